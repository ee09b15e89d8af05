# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible image and video routes, and their contract with the server of the model.

The routes are `/v1/images/generations`, `/v1/images/edits` and `/v1/videos`. The server of the
model is this package's worker, or an executor without workers.

The family's `Capabilities` (`ModelFamily.capabilities`) limit requests; a route refuses others with
400. Accepted requests are stock pooling requests: `DiffusionParams(...).to_pooling_params(tensors)`
through `EngineClient.encode`. The result of each is one envelope (`outputs.py`).

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

The request is for an image exactly if num_frames is None.

Input tensors:
- `image` is uint8 [H, W, 3] RGB. Further images of an edit are `image_1`, `image_2` and so on, in
  the client's order. In an edit each image has its original size (EXIF rotation applied,
  transparent parts white). For a video `image` is the first frame, stretched to the video's height
  and width.
- `video` is uint8 [T, H, W, 3] RGB, a clip to edit (`video_edit`), at `Capabilities.fps` frames per
  second, with num_frames = 1 + frame_stride * k <= T. Size and length of the result follow the
  clip, and height and width are ignored.
- `mask` is uint8 [H, W] with the size of `image`; 255 marks pixels to edit. Only if
  `Capabilities.mask`.

Result tensors: `images`, uint8 [num_images, H, W, 3], or `frames`, uint8 [num_frames, H, W, 3].
`audio`, fp32 [S] with the metadata `sample_rate`, is allowed but not used yet. H and W may differ
from the request, and the reply contains the actual ones. The routes also read the metadata `fps`
(of the frames) and `timings_ms`. Image i of a request has the seed `seed + i`, so n images do not
depend on how they are split into requests.

Failures are error envelopes. `invalid_request`, `unsupported_size`, `invalid_image` and other codes
about the request become 400 with the message unchanged. `capacity` becomes 503 (a video job waits
instead), `oom` 503, `non_finite` and the rest 500.

Progress: the worker RPC `request_progress` returns `{session_id: [finished steps, all steps]}` of
the requests in flight. Cancellation: `EngineClient.abort(request_id)` takes effect before the next
denoise step.

World models (`"world" in tasks`) generate a video chunk by chunk in a separate session with
`chunk_index` 0, 1 and so on. The first request has prompt, seed, height, width and `image`; every
request has `actions` (held keys per latent frame); `op="close"` ends the session. Frames beyond the
requested number are dropped.
"""
