# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible image and video routes: `/v1/images/generations`, `/v1/images/edits`, `/v1/videos`.

Contract between these routes and the model's server (our worker, or an executor without workers).

The family's `Capabilities` (`ModelFamily.capabilities`) bound requests; a route refuses others with 400. Accepted
requests reach the engine as stock pooling requests, `DiffusionParams(...).to_pooling_params(tensors)` through
`EngineClient.encode`, and each is answered by one envelope (`outputs.py`).

One-shot models (`"world" not in tasks`). One image call is `ceil(n / images_per_request)` requests, one video is one
request. Fields of `DiffusionParams`:

    session_id            unique for the request          one_shot             True
    op                    "generate"                      output               "rgb"
    prompt                always set (it may be "")       negative_prompt      None or text (`Capabilities`)
    height, width         always set, multiples of `size_multiple`, at most `max_pixels`
    seed                  always set (drawn by the door if the client named none)
    num_inference_steps   set unless the family's default is None     guidance_scale   likewise
    num_images            pictures wanted, 1..images_per_request; 1 for videos
    num_frames, fps       None for pictures; for videos always set, num_frames = 1 + frame_stride * k
    options               the client's `extra_params` as sent: the model checks names and values

    A picture is asked for exactly when num_frames is None.

Input tensors: `image` uint8 [H, W, 3] RGB; an edit's further pictures are `image_1`, `image_2`, ... in the client's
order. For an edit each has the size the client sent (EXIF rotation applied, transparent parts white); for a video
`image` is the first frame, stretched to the video's height and width. `video` uint8 [T, H, W, 3] RGB is a clip to edit
(`video_edit`), at `Capabilities.fps` frames a second, num_frames = 1 + frame_stride * k <= T; the result's size and
length follow it, whatever height and width say. `mask` uint8 [H, W], 255 = paint here, the size of
`image`; only if `Capabilities.mask`.

Result tensors: `images` uint8 [num_images, H, W, 3], or `frames` uint8 [num_frames, H, W, 3]; `audio` fp32 [S] with
meta `sample_rate` may come along and is not used yet. H and W may differ from the request (the reply states them).
Meta the routes read if present: `fps` (of the frames), `timings_ms`. Image i of a request is drawn with `seed + i`,
so that n pictures are the same however they are cut into requests.

Failures are error envelopes: `invalid_request`, `unsupported_size`, `invalid_image` and other words about the request
become 400 with the message as it is; `capacity` 503 (a video job waits instead), `oom` 503, `non_finite` and the rest
500.

Progress: worker RPC `request_progress` -> `{session_id: [steps done, steps in all]}` of the requests in flight. Cancel:
`EngineClient.abort(request_id)`, in force before the next denoise step.

Worlds (`"world" in tasks`) make a video chunk after chunk in one session of their own: `chunk_index` 0, 1, ...;
prompt, seed, height, width and `image` with the first; `actions` (held keys per latent frame) with each; then
`op="close"`. Frames behind the wanted number are cut off.
"""
