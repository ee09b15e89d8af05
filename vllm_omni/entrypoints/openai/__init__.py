# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible image and video routes, and their contract with the component that runs the
model.

The routes are `/v1/images/generations`, `/v1/images/edits` and `/v1/videos`. The model is run by
this package's worker or by an executor without workers.

The family's `Capabilities` (`ModelFamily.capabilities`) limit requests; a route refuses all others
with
400. Accepted requests are stock pooling requests: `DiffusionParams(...).to_pooling_params(tensors)`
  through `EngineClient.encode`. The result of each engine request is one envelope (`outputs.py`).

One-shot models (`"world" not in tasks`): an image call is `ceil(n / images_per_request)` requests,
and a video is one request. Fields of `DiffusionParams`:

        session_id            unique for the request          one_shot             True
        op                    "generate"                      output               "rgb"
        prompt
            always set (may be "")          negative_prompt      None or text (`Capabilities`)
        height, width         always set, multiples of `size_multiple`, at most `max_pixels`
        seed                  always set (drawn by the endpoint if the client sent none)
        num_inference_steps   set unless the family's default is None     guidance_scale   likewise
        num_images            number of images, 1..images_per_request; 1 for videos
        num_frames, fps
            None for images; for videos always set, num_frames = 1 + frame_stride * k
        options
            the client's `extra_params` unchanged: the model checks names and values

A request with num_frames None is for an image, any other request for a video.

Input tensors:
- `image` is uint8 [H, W, 3] RGB. Further images of an edit are named `image_1`, `image_2` and so
  on, in the client's order. In an edit, each image has its original size (EXIF rotation applied,
  transparent areas white). For a video, `image` is the first frame, stretched to the video's height
  and width.
- `video` is uint8 [T, H, W, 3] RGB, a clip to edit (`video_edit`), at `Capabilities.fps` frames per
  second, with num_frames = 1 + frame_stride * k <= T. Size and length of the result match the clip,
  and height and width are ignored.
- `mask` is uint8 [H, W] with the size of `image`; 255 marks pixels to edit. Only if
  `Capabilities.mask`.

Result tensors: `images`, uint8 [num_images, H, W, 3], or `frames`, uint8 [num_frames, H, W, 3].
`audio`, fp32 [S] with the metadata `sample_rate`, is allowed but not used yet. H and W may differ
from the request, and the reply contains the actual ones. The routes also read the metadata `fps`
(of the frames) and `timings_ms`. Image i of a request has the seed `seed + i`, so the n images of a
call do not depend on how they are split into requests.

Failures are error envelopes. `invalid_request`, `unsupported_size`, `invalid_image` and other codes
about the request become 400, with the message unchanged. `capacity` becomes 503 (a video job waits
instead), `oom` becomes 503, `non_finite` and all others become 500.

Progress: the worker RPC `request_progress` returns `{session_id: [finished steps, all steps]}` of
the requests in flight. Cancellation: `EngineClient.abort(request_id)` takes effect before the next
denoise step.

World models (`"world" in tasks`) generate a video chunk by chunk in a separate session with
`chunk_index` 0, 1 and so on. The first request contains prompt, seed, height, width and `image`;
every request contains `actions` (held keys per latent frame); `op="close"` ends the session. Frames
beyond the requested number are dropped.
"""
