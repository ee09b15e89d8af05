# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible image and video routes, and the contract between these routes and the component
that runs the model.

The routes are `/v1/images/generations`, `/v1/images/edits` and `/v1/videos`. The model runs either
in this package's worker or in an executor without workers.

The model family's `Capabilities` (`ModelFamily.capabilities`) determine which requests are
accepted; a route refuses all others with 400. An accepted request is sent as a stock pooling
request: `DiffusionParams(...).to_pooling_params(tensors)` through `EngineClient.encode`. Each
engine request returns one envelope (`outputs.py`).

For one-shot models (`"world" not in tasks`), an image call becomes `ceil(n / images_per_request)`
engine requests, and a video becomes one engine request. The fields of `DiffusionParams` are:

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

A request is for images if `num_frames` is None, and otherwise for a video.

Input tensors:
- `image` is uint8 [H, W, 3] RGB. An edit's additional images are named `image_1`, `image_2` and so
  on, in the client's order. In an edit, each image keeps its original size. EXIF rotation is
  applied, and transparent areas become white. For a video, `image` is the first frame, stretched to
  the video's height and width.
- `video` is uint8 [T, H, W, 3] RGB, a clip to edit (`video_edit`), at `Capabilities.fps` frames per
  second, with num_frames = 1 + frame_stride * k <= T. The result has the clip's size and length, so
  the request's height and width are ignored.
- `mask` is uint8 [H, W] with the size of `image`; 255 marks pixels to edit. A mask is sent only if
  `Capabilities.mask` is set.

Result tensors: `images`, uint8 [num_images, H, W, 3], or `frames`, uint8 [num_frames, H, W, 3].
`audio`, fp32 [S] with `sample_rate` in the metadata, is allowed but not used yet. H and W may
differ from the requested size; the reply to the client states the actual size. The routes also read
`fps` (the result's frame rate) and `timings_ms` from the metadata. Image i of a request has the
seed `seed + i`, so a call's n images do not depend on how it is split into engine requests.

The engine reports failures as error envelopes. `invalid_request`, `unsupported_size`,
`invalid_image` and other codes that concern the request become status 400, with the message
unchanged.
`capacity` becomes 503, except that a video job waits instead. `oom` also becomes 503. `non_finite`
and all other codes become 500.

The worker RPC `request_progress` reports progress: it returns
`{session_id: [finished steps, total steps]}` for the requests in flight.
`EngineClient.abort(request_id)` cancels a request before its next denoise step.

World models (`"world" in tasks`) generate a video chunk by chunk in a separate session with
`chunk_index` 0, 1 and so on. The first request contains prompt, seed, height, width and `image`;
every request contains `actions` (held keys per latent frame); `op="close"` ends the session. Any
frames beyond the requested number are dropped.
"""
