# SPDX-License-Identifier: Apache-2.0
"""Every sentence about a refusal, in pages and in option descriptions, has an entry in this file
that verifies it.

`AT_START` contains option combinations that must raise an error before any process starts. The
tests create the engine configuration as `vllm serve` does. `HELD_BY` maps refusals of requests,
files and slow readers to the tests that verify them.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import names
import pytest
import snippets as docs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_omni.model_executor.models.registry import get_family

_REFUSAL = re.compile(r"\brefus(?:ed|es|al)\b|\b(?:is|are) an error\b|\ban error at start\b", re.I)
_MODELS = docs.REPO / "vllm_omni" / "model_executor" / "models"
PAGES = [
    docs.REPO / "README.md",
    *sorted((docs.REPO / "docs").rglob("*.md")),
    *sorted(_MODELS.glob("*/README.md")),
    docs.REPO / "vllm_omni" / "config.py",
    *sorted(_MODELS.glob("*/config.py")),
    *sorted(_MODELS.glob("*/options.py")),
    docs.REPO / "vllm_omni" / "model_executor" / "streaming" / "options.py",
]

Case = tuple[str, dict[str, Any], dict[str, Any]]
"""A model, its options under `omni`, and vLLM engine arguments."""

PP2, PP3, TP2, TP3 = (
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 3},
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 3},
)
STOCK = {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}
MATCHED = {
    "cache": "noise_matched",
    "denoising_steps": [1000, 750],
    "video_denoising_steps": [700, 500],
}
TWO_CHUNKS = {"chunks_in_flight": 2}
TEMPORAL = {"pipeline": "temporal", "chunks_in_flight": 2}
BANDS = {"vae_parallel": True}
COARSE = {"height": 64, "width": 96}
"""A frame size for models that accept only multiples of 32 pixels."""


def ladder(*rungs: str) -> dict[str, Any]:
    return {"scheduling": "deadline", "degradations": list(rungs)}


NO_LADDER = ("waypoint", "lance", "wan2_2", "diffusers_pipeline")
LADDER = ("lingbot_world", "matrix_game", "causal_wan")
TINY = {"model": {"decoder": "tiny"}}
NO_CHUNKS_AHEAD = ("lingbot_world", "wan2_2", "lance", "diffusers_pipeline")

AT_START: dict[str, list[Case]] = {
    # README and serving.md
    "refuses invalid option combinations within seconds": [
        ("null_world", {"no_such_option": 1}, {})
    ],
    "An unknown key or a value out of range is an error": [
        ("null_world", {"no_such_option": 1}, {}),
        ("null_world", {"max_sessions": 0}, {}),
    ],
    # parallelism.md
    "`vae_parallel` with one rank or with a model other than causal Wan and LingBot World, is an "
    "error at start": [
        ("causal_wan", BANDS | {"model": {"decoder": "tiny"}}, TP2),
        ("causal_wan", BANDS, {}),
        ("wan2_2", BANDS, TP2),
        ("lance", BANDS, TP2),
        ("diffusers_pipeline", BANDS, {}),
    ],
    "| LingBot World | exact |": [
        ("lingbot_world", TWO_CHUNKS, {}),
        ("lingbot_world", TEMPORAL, PP2),
        ("lingbot_world", {"model": {"cfg_parallel": True}}, TP2),
    ],
    "| Wan 2.2 | exact |": [("wan2_2", TWO_CHUNKS, {}), ("wan2_2", TEMPORAL, PP2)],
    "| Lance | refused |": [
        ("lance", {}, PP2),
        ("lance", {"vae_stage": True}, PP2),
        ("lance", {"vae_stage": True}, PP3),
        ("lance", {}, PP2 | TP2),
        ("lance", {"vae_stage": True}, PP2 | TP2),
        ("lance", TWO_CHUNKS, {}),
        ("lance", TEMPORAL, PP2),
        ("lance", {"model": {"cfg_parallel": True}}, TP2),
    ],
    "| images and videos through diffusers | refused |": [
        ("diffusers_pipeline", {}, PP2),
        ("diffusers_pipeline", {"vae_stage": True}, PP2),
        ("diffusers_pipeline", {"vae_stage": True}, PP3),
        ("diffusers_pipeline", {}, TP2),
        ("diffusers_pipeline", {}, PP2 | TP2),
        ("diffusers_pipeline", {"vae_stage": True}, PP2 | TP2),
        ("diffusers_pipeline", TWO_CHUNKS, {}),
        ("diffusers_pipeline", TEMPORAL, {}),
        ("diffusers_pipeline", {"model": {"cfg_parallel": True}}, {}),
    ],
    "| `vae_stage` with one stage |": [("causal_wan", {"vae_stage": True}, {})],
    "| stages with a scheduler that runs whole chunks |": [("causal_wan", {}, PP2 | STOCK)],
    "| `vae_parallel` with one rank a stage, with decoder `tiny`, or with another model |": [
        ("causal_wan", BANDS, PP2),
        ("causal_wan", BANDS | {"model": {"decoder": "tiny"}}, TP2),
        ("wan2_2", BANDS, TP2),
    ],
    "| `chunks_in_flight`, `temporal` with cache `strict`, or with another model |": [
        ("causal_wan", TWO_CHUNKS, {}),
        ("causal_wan", TEMPORAL, PP2),
        *((model, TWO_CHUNKS, {}) for model in NO_CHUNKS_AHEAD),
    ],
    "| `temporal` without exactly one stage with layers per denoise step |": [
        ("causal_wan", TEMPORAL | {"model": MATCHED}, PP3),
        ("causal_wan", TEMPORAL | {"model": MATCHED, "vae_stage": True}, PP2),
        ("causal_wan", TEMPORAL | {"model": MATCHED}, {}),
    ],
    "| `chunks_in_flight`, `temporal` with a scheduler that runs whole chunks |": [
        ("causal_wan", TWO_CHUNKS | {"model": MATCHED}, STOCK),
        ("causal_wan", TEMPORAL | {"model": MATCHED}, PP2 | STOCK),
    ],
    "| `temporal` with `pipeline_partition` |": [
        ("causal_wan", TEMPORAL | {"model": MATCHED, "pipeline_partition": [2, 2]}, PP2)
    ],
    "| `pipeline_partition` that does not fit stages or layers |": [
        ("causal_wan", {"pipeline_partition": [4]}, PP2),
        ("causal_wan", {"pipeline_partition": [4, 1]}, PP2),
    ],
    "| pipeline stages of Lance |": [("lance", {}, PP2)],
    "| several ranks of a diffusers pipeline |": [("diffusers_pipeline", {}, TP2)],
    "| `cfg_parallel` with other than two tensor-parallel ranks, or with `sequence_parallel` |": [
        ("wan2_2", {"model": {"cfg_parallel": True}}, TP3),
        ("wan2_2", {"model": {"cfg_parallel": True, "sequence_parallel": True}}, TP2),
    ],
    "| heads that do not divide over the ranks |": [
        ("causal_wan", {}, TP3),
        ("lingbot_world", {"model": {"sequence_parallel": True}}, TP3),
    ],
    # scheduling.md
    "| `fewer_steps`: the denoise steps of `realtime` (two) |": [
        ("lingbot_world", ladder("fewer_steps") | {"model": {"max_steps": 2}}, {}),
        ("matrix_game", ladder("fewer_steps") | {"model": {"max_steps": 2}}, {}),
        ("causal_wan", ladder("fewer_steps") | {"model": MATCHED}, {}),
        *((model, ladder("fewer_steps"), {}) for model in NO_LADDER),
    ],
    "| `tiny_vae`: frames by the tiny decoder": [
        *((model, ladder("tiny_vae") | TINY, {}) for model in LADDER),
        *((model, ladder("tiny_vae"), {}) for model in NO_LADDER),
    ],
    # models' notes
    "An unknown value is refused at startup": [
        ("lingbot_world", {"model": {"convention": "no_such_value"}}, {})
    ],
    "An unknown value is refused before anything is loaded": [
        ("lingbot_world", {"model": {"convention": "no_such_value"}}, {})
    ],
    "`omni.kv_growth` and `omni.chunks_in_flight` above 1 are refused": [
        ("dreamx_world", COARSE | BANDS, TP2),
        ("dreamx_world", COARSE | {"kv_growth": True}, {}),
        ("dreamx_world", COARSE | TWO_CHUNKS, {}),
    ],
    # presets.md
    "and a device without FP8 units is refused": [
        ("lingbot_world", {"model": {"preset": "balanced"}}, {})
    ],
    "A start is refused with one line if something is missing": [
        ("lingbot_world", {"model": {"preset": "realtime"}}, {}),
        ("matrix_game", {"model": {"preset": "small", "fp8": True}}, {"dtype": "float32"}),
    ],
    "**Async scheduling is refused.**": [("null_world", {}, {"async_scheduling": True})],
}
"""Configurations that must be refused. Each key is an excerpt of the sentence or table row that
describes the refusal.
"""

HELD_BY = {
    # realtime_world_camera.md
    "If the engine then refuses the request's model options or adapters": (
        "tests/entrypoints/realtime/test_world_camera_refusals.py"
        "::test_a_restart_that_the_engine_refuses_ends_the_session"
    ),
    "A refused request changes nothing, except for a": (
        "tests/entrypoints/realtime/test_world_camera_refusals.py"
        "::test_a_refused_restart_does_not_change_the_session"
    ),
    # releasing.md
    "`scripts/release.py` refuses to build a release if": (
        "tests/test_release.py::test_version_is_the_same_everywhere"
    ),
    # notes of the 5B worlds
    "Sink frames are refused, as in the original": (
        "tests/model_executor/models/abot_world/test_abot_pipeline.py"
        "::test_unsupported_options_are_refused"
    ),
    "Sessions without a start image are refused, although the original code allows them": (
        "tests/model_executor/models/abot_world/test_abot_pipeline.py"
        "::test_a_first_chunk_needs_an_image"
    ),
    "A pose that is not a rotation, poses in another number and poses together with keys": (
        "tests/model_executor/models/dreamx_world/test_dreamx_camera.py"
        "::test_invalid_poses_are_refused"
    ),
    "A number of sink frames larger than the first chunk is refused": (
        "tests/model_executor/models/dreamx_world/test_dreamx_pipeline.py"
        "::test_more_sinks_than_the_first_chunk_are_refused"
    ),
    # images_and_videos_api.md
    "files `images[NAME]` of a form. A refusal lists the names": (
        "tests/entrypoints/realtime/test_named_images.py::test_bad_images_are_refused"
    ),
    # realtime_video.md
    "a velocity outside an axis's range is refused": (
        "tests/entrypoints/realtime/test_world_poses.py::test_a_velocity_beyond_the_axes_is_refused"
    ),
    # realtime_webrtc.md and spectators.md
    "so an offer without H.264 is refused": (
        "tests/entrypoints/realtime/test_webrtc.py"
        "::test_a_bad_offer_is_refused_and_allocates_nothing"
    ),
    "A model that requires a start image refuses such an offer": (
        "tests/entrypoints/realtime/test_webrtc.py"
        "::test_a_player_of_a_model_with_start_images_is_refused"
    ),
    "A refused offer leaves neither a session nor a socket": (
        "tests/entrypoints/realtime/test_webrtc.py"
        "::test_a_bad_offer_is_refused_and_allocates_nothing"
    ),
    "Pages of other origins are refused as [elsewhere]": (
        "tests/entrypoints/realtime/test_spectators.py::test_pages_of_other_origins_may_not_watch"
    ),
    # actions.md and the tutorial
    "`required`, `optional`, or `none` (refused)": (
        "tests/entrypoints/realtime/test_actions_at_endpoints.py"
        "::test_a_first_prompt_or_image_is_refused_where_there_is_none"
    ),
    "before the change the server "
    "refused `run`": "tests/docs/test_tutorials.py::test_the_tutorial_works_as_printed",
    # realtime_world_camera.md
    "A start pose in a later request, or for a model without world poses": (
        "tests/environments/test_world_env.py::test_a_start_pose_needs_a_world_with_poses"
    ),
    # web_page.md
    "The page refuses a file that it cannot decode": (
        "tests/entrypoints/webui/test_page_world.py::"
        "test_a_file_that_is_no_image_does_not_become_a_tile"
    ),
    "`enhance_prompt`, `enable_frame_interpolation` and `enable_upscaling` are refused": (
        "tests/entrypoints/realtime/test_generate_endpoint.py::"
        "test_a_bad_init_is_one_error_and_a_good_one_follows"
    ),
    "A repository of an unsupported model is refused before its weights are downloaded": (
        "tests/entrypoints/cli/test_hub_ids.py::"
        "test_a_repository_of_another_model_is_refused_before_its_weights"
    ),
    "or if you must accept its licence, the refusal names": (
        "tests/entrypoints/cli/test_hub_ids.py::"
        "test_a_release_that_needs_more_than_its_repository_names_the_download"
    ),
    "If the server refuses a request permanently": (
        "tests/entrypoints/webui/test_page_errors.py::"
        "test_a_refused_request_stops_the_world_until_tried_again"
    ),
    # lora.md and session_snapshots.md
    "it refuses the snapshot with `foreign_snapshot`": (
        "tests/worker/test_adapters_in_runner.py::test_a_snapshot_names_its_adapters_and_requires_them"
    ),
    "otherwise `replay` refuses it": (
        "tests/entrypoints/cli/test_replay.py::test_a_recording_names_the_adapters_it_needs"
    ),
    # serving.md and the glossary
    "lists vLLM's arguments that are refused": (
        "tests/test_engine_arguments.py::test_every_argument_that_is_refused_is_tried_here"
    ),
    "finishes chunks, saves sessions and refuses new ones": (
        "tests/entrypoints/realtime/test_drain.py::test_nothing_new_starts"
    ),
    # lance.md, online
    "Tools, `logprobs`, penalties and other formats are refused": (
        "tests/entrypoints/openai/test_chat_request.py::test_unsupported_fields_are_refused_by_name"
    ),
    # wan2_2.md
    "It is refused with `omni.model.cuda_graphs`": (
        "tests/test_engine_arguments.py::test_cpu_offload_is_refused_with_movable_layers_or_cuda_graphs"
    ),
    # quantization.md
    "Where vLLM has no kernel for a format": (
        "tests/model_executor/test_checkpoint_quantization.py::"
        "test_formats_without_a_cpu_kernel_are_refused_only_on_a_cpu"
    ),
    "These are refused with one line: a method that is not in the table": (
        "tests/model_executor/test_quantized_weights.py::"
        "test_missing_scales_are_refused_with_three_examples"
    ),
    "An argument that would have no effect, such as `--offload-group-size`": (
        "tests/test_engine_arguments.py::test_a_start_is_refused_with_one_line"
    ),
    "(without `--quantization` it is refused)": (
        "tests/test_engine_arguments.py::test_half_of_a_quantization_is_refused"
    ),
    "a paused engine refuses requests": (
        "tests/entrypoints/test_engine_refusals.py::test_an_endpoint_gets_one_type_of_failure"
    ),
    # requests of diffusers pipelines, Lance and the image and video routes
    "sizes that the pipeline would silently round "
    "are refused": "tests/executor/test_call_arguments.py::test_refusals",
    "A field or option that the pipeline has no argument for is an error": (
        "tests/executor/test_call_arguments.py::test_refusals"
    ),
    "pickled ones, and code inside a checkpoint, are refused": (
        "tests/model_executor/models/diffusers_pipeline/test_diffusers_checkpoint.py::"
        "test_missing_and_pickled_weights"
    ),
    "the engine refuses sizes that are not divisible by that multiple": (
        "tests/executor/test_call_arguments.py::test_refusals"
    ),
    "Anything else is refused with the allowed values": (
        "tests/model_executor/models/lance/test_lance_request.py::"
        "test_a_generation_out_of_range_is_refused"
    ),
    "and is refused when the tensors do not fit": (
        "tests/model_executor/models/lance/test_lance_request.py::test_a_contradiction_is_refused"
    ),
    "`options.resolution` is refused": (
        "tests/model_executor/models/lance/test_lance_choices.py"
        "::test_every_frame_of_a_clip_is_read_and_its_length_is_bounded"
    ),
    "a refusal names a size near it": (
        "tests/entrypoints/openai/test_plan.py::"
        "test_a_side_that_is_too_long_is_refused_with_a_near_size"
    ),
    "`transparent` is refused": (
        "tests/entrypoints/openai/test_openai_served.py::"
        "test_refusals_have_the_form_of_openais_errors"
    ),
    "a model that cannot use one refuses it": (
        "tests/entrypoints/openai/test_plan.py::test_fields_that_the_model_does_not_support_are_refused"
    ),
    "and a different `size` is refused": (
        "tests/entrypoints/openai/test_plan.py::test_half_a_size_and_two_sizes_are_refused"
    ),
    "a request with both is refused": (
        "tests/entrypoints/openai/test_openai_served.py::"
        "test_videos_that_cannot_be_made_are_refused_at_once"
    ),
    "`num_frames` and `fps` are refused with it": (
        "tests/entrypoints/openai/test_plan.py::test_a_length_for_an_edited_video_is_refused"
    ),
    "refused by models in which they are fixed": (
        "tests/entrypoints/openai/test_plan.py::test_fields_that_the_model_does_not_support_are_refused"
    ),
    "T2V refuses it": (
        "tests/entrypoints/openai/test_openai_wan22.py::"
        "test_videos_that_cannot_be_made_are_refused_at_once"
    ),
    "`/v1/audio/speech` refuses any `speed` other than 1": (
        "tests/entrypoints/speech/test_protocol_speech.py::test_refusals_name_the_field"
    ),
    # endpoints
    "the script refuses other numbers": (
        "tests/examples/test_offline_lingbot_world.py::test_a_path_that_fills_no_chunk_is_refused"
    ),
    "Without a policy the server refuses the request": (
        "tests/entrypoints/realtime/test_world_camera_refusals.py"
        "::test_bad_requests_are_refused_by_name_and_change_nothing"
    ),
    "rounded down, filled up or refused, as the client requests": (
        "tests/entrypoints/realtime/test_world_camera_refusals.py::test_pose_policies"
    ),
    "Any other number of poses is an error unless": (
        "tests/entrypoints/realtime/test_world_camera_refusals.py"
        "::test_bad_requests_are_refused_by_name_and_change_nothing"
    ),
    "others, NaN, Inf, focal lengths that are not positive": (
        "tests/entrypoints/realtime/test_world_camera_refusals.py"
        "::test_bad_requests_are_refused_by_name_and_change_nothing"
    ),
    "principal points outside the image are refused": (
        "tests/entrypoints/realtime/test_world_camera_refusals.py::"
        "test_intrinsics_that_fit_no_image_are_refused"
    ),
    "A refused request changes nothing": (
        "tests/entrypoints/realtime/test_world_camera_refusals.py"
        "::test_bad_requests_are_refused_by_name_and_change_nothing"
    ),
    "A refused message has no effect": (
        "tests/entrypoints/realtime/test_generate_endpoint.py::"
        "test_a_text_frame_does_not_end_the_session"
    ),
    "Text frames from a client are refused": (
        "tests/entrypoints/realtime/test_world_camera_refusals.py::"
        "test_text_frames_are_refused_and_the_third_closes"
    ),
    "of all realtime endpoints; one more is refused with 503": (
        "tests/entrypoints/realtime/test_live_faults.py::"
        "test_connections_of_all_endpoints_are_counted_together"
    ),
    "beyond it delivery logs are cut and new sessions refused": (
        "tests/entrypoints/realtime/test_live_faults.py::test_bytes_held_for_readers_are_bounded"
    ),
    "Beyond the bound, new sessions are refused and running sessions wait": (
        "tests/entrypoints/realtime/test_live_faults.py::test_bytes_held_for_readers_are_bounded"
    ),
    "refuses new connections and `POST`/`PUT` with 503": (
        "tests/entrypoints/realtime/test_drain.py::test_nothing_new_starts"
    ),
    "live sessions; a further one is refused with `capacity`": (
        "tests/entrypoints/realtime/test_world_camera_sessions.py::"
        "test_a_full_server_refuses_at_once_and_accepts_again_after_a_disconnect"
    ),
    "Further sessions are refused with `capacity`": (
        "tests/entrypoints/realtime/test_world_camera_sessions.py::"
        "test_a_full_server_refuses_at_once_and_accepts_again_after_a_disconnect"
    ),
    "image calls and video jobs: `completed`, `failed`, `cancelled`, `refused`": (
        "tests/entrypoints/openai/test_openai_served.py"
        "::test_jobs_beyond_the_queue_are_refused_with_429_and_when_to_come_back"
    ),
    # the engine
    "an image of fewer than 8 pixels of height per rank is refused": (
        "tests/model_executor/models/wan/test_split_decode.py::test_every_rank_needs_a_row"
    ),
    "data parallel is refused": "tests/worker/test_shared_gpu_worker.py::"
    "test_several_engines_are_refused",
    "(together at most 95 % of the engine's time) is refused": (
        "tests/core/test_scheduling_policy.py::test_a_stream_above_capacity_is_refused"
    ),
    "A stream whose rate cannot be sustained is refused with `capacity`": (
        "tests/engine/test_deadline_scheduling.py::"
        "test_a_stream_above_capacity_is_refused_with_the_reason"
    ),
    "turns refusal on": "tests/core/test_scheduling_policy.py::"
    "test_a_stream_above_capacity_is_refused",
    "A stream that is being served is never refused": (
        "tests/core/test_scheduling_policy.py::test_a_stream_above_capacity_is_refused"
    ),
    "has been served nothing is refused": (
        "tests/core/test_scheduling_policy.py::test_a_stream_above_capacity_is_refused"
    ),
    "refusal, for which the runner returns `capacity`": (
        "tests/worker/test_scheduler_note_in_runner.py::"
        "test_a_refused_request_fails_without_a_session"
    ),
    "is refused by one whose `degradations` lack `tiny_vae`": (
        "tests/worker/test_snapshot_refusals.py::"
        "test_an_incompatible_snapshot_is_refused_with_the_reason"
    ),
    "reads the length first and refuses before the rest arrives": (
        "tests/entrypoints/realtime/test_floods_served.py::"
        "test_a_snapshot_of_a_long_table_is_refused_by_its_first_bytes"
    ),
    "sends a body that is refused": (
        "tests/entrypoints/test_body_timeout.py::test_refused_bodies_of_one_client_are_read_slowly"
    ),
    "The server refuses a snapshot that it cannot use before the engine allocates memory": (
        "tests/worker/test_snapshot_refusals.py::"
        "test_an_incompatible_snapshot_is_refused_with_the_reason"
    ),
    "a missing tensor, a superfluous tensor or a wrong shape is an error": (
        "tests/worker/test_snapshot_refusals.py::"
        "test_an_incompatible_snapshot_is_refused_with_the_reason"
    ),
    "`write_session`, which refuses to write if a chunk has finished in between": (
        "tests/worker/test_snapshot_refusals.py::test_a_session_that_changes_during_a_save_is_busy"
    ),
    "After an aborted, failed or refused chunk": (
        "tests/worker/test_diffusion_model_runner.py::test_a_chunk_out_of_order_is_refused"
    ),
    "not even one session of the largest shape fits is refused at start": (
        "tests/worker/test_diffusion_model_runner.py::test_sessions_are_bounded_in_bytes"
    ),
    # checkpoints, language models
    "and refused for any other type": (
        "tests/model_executor/models/lingbot_world/test_lingbot_config.py"
        "::test_what_the_code_does_not_implement_is_an_error"
    ),
    "A value that this code does not support is an error": (
        "tests/model_executor/models/lance/test_lance_checkpoint.py::"
        "test_a_config_of_another_network_is_refused"
    ),
    "Drafters that would misread additional layers are refused at startup": (
        "tests/worker/test_hidden_state_layers.py::"
        "test_a_drafter_that_would_read_the_taps_is_refused"
    ),
    "cannot be combined with hidden states (the server refuses to start)": (
        "tests/core/test_ar_hidden_states_scheduler.py::test_return_sampling_mask_is_refused"
    ),
    "With any other scheduler the worker refuses to start": (
        "tests/worker/test_ar_hidden_states_offered.py::"
        "test_a_worker_requires_the_hidden_states_scheduler"
    ),
    "A worker that does not fit the model is refused at the start": "tests/test_worker_choice.py",
    "a parameter of image models (`num_inference_steps`, `guidance_scale`, `negative_prompt`) "
    "is refused": (
        "tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py::"
        "test_a_bad_first_request_is_named_and_changes_nothing"
    ),
    # of stock vLLM: why the format is ours
    "stock auto-detection refuses them": "tests/test_import_purity.py",
    "| Waypoint | refused: its Euler steps draw no noise": (
        "tests/model_executor/test_schedules.py::test_a_trajectory_is_refused_where_it_has_no_meaning"
    ),
    "| any model on several pipeline stages | refused |": (
        "tests/model_executor/test_schedules.py::test_a_trajectory_is_refused_where_it_has_no_meaning"
    ),
    "| any model with `omni.model.first_chunk_steps` | refused": (
        "tests/model_executor/test_schedules.py::test_a_trajectory_is_refused_where_it_has_no_meaning"
    ),
    "| image and video models | refused |": (
        "tests/environments/test_env_served.py::test_replacing_weights_ends_the_episodes_of_environments"
    ),
    "(`--weight-transfer-config`) is refused": "tests/test_engine_arguments.py",
    "A step whose chunk exists is refused with `out_of_order`": (
        "tests/environments/test_remote_env.py::test_a_step_is_never_made_twice"
    ),
    "Every other combination is refused before any process starts": "tests/test_combinations.py",
}
"""Tests that verify refusals. Each key is an excerpt of the sentence that describes the refusal."""


def sentences(path: Path) -> Iterator[str]:
    """Yield the sentences of a page or of a module's docstrings. A table row counts as one
    sentence.
    """
    text = (
        names.docstrings(ast.parse(path.read_text())) if path.suffix == ".py" else path.read_text()
    )
    text = re.sub(r"<!--.*?-->", "", names.FENCE.sub("", text), flags=re.S)
    for block in re.split(r"\n\s*\n|\n(?=\||- |\d+\. )", text):
        block = " ".join(block.split())
        yield from (
            [block] if block.startswith("|") else re.split(r"(?<=[.:;])\s+(?=[A-Z`*\[(-])", block)
        )


def refusals(path: Path) -> list[str]:
    """Return the sentences that describe a refusal. In parallelism.md, also return the rows of the
    table of rejected combinations.

    Generated pages are excluded: tests/test_engine_arguments.py checks the table of engine
    arguments, and the options page quotes docstrings, which this function reads directly.
    """
    if path.name in ("engine_arguments.md", "options.md"):
        return []
    found = [sentence for sentence in sentences(path) if _REFUSAL.search(sentence)]
    if path.name == "parallelism.md":
        table = path.read_text().split("| combination | reason |\n|---|---|\n")[1].split("\n\n")[0]
        found += table.splitlines()
    return found


@cache
def checkpoint(folder: Path, name: str) -> Path:
    family = get_family(name)
    family.make_tiny(folder / name, 0, family.layouts[0])
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("refusals")


def configure(model: Path, omni: dict[str, Any], arguments: dict[str, Any]) -> VllmConfig:
    """Create the engine configuration as `vllm serve` does."""
    return EngineArgs(
        model=str(model),
        config_format="omni",
        skip_tokenizer_init=True,
        enforce_eager=True,
        additional_config={"omni": {"height": 32, "width": 48, **omni}},
        **arguments,
    ).create_engine_config()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(docs.REPO)))
def test_every_sentence_about_a_refusal_has_an_entry(path: Path) -> None:
    """Every sentence about a refusal matches an entry in this file."""
    known = [*AT_START, *HELD_BY, "the same, refusing", "a snapshot taken with another split"]
    assert [
        sentence for sentence in refusals(path) if not any(part in sentence for part in known)
    ] == []


def test_no_entry_is_left_over() -> None:
    """Every entry in this file matches a sentence, so an entry must change together with its
    sentence.
    """
    written = [sentence for path in PAGES for sentence in refusals(path)]
    assert [
        part for part in (*AT_START, *HELD_BY) if not any(part in sentence for sentence in written)
    ] == []


@pytest.mark.parametrize("part", [part for part, cases in AT_START.items() if cases])
def test_what_a_page_calls_refused_is_refused(part: str, folder: Path) -> None:
    """A configuration that a page describes as refused raises an error with a reason before any
    process starts.
    """
    for model, omni, arguments in AT_START[part]:
        with pytest.raises(ValueError, match=r"omni|parallel|async") as refused:
            configure(checkpoint(folder, model), omni, arguments)
        assert re.search(r"[a-z]{3,} [a-z]{2,} ", str(refused.value)), "a reason"


@pytest.mark.parametrize(
    "case",
    [
        ("causal_wan", TEMPORAL | {"model": MATCHED}, PP2),
        *((model, ladder("tiny_vae", "fewer_steps"), {}) for model in LADDER),
        ("causal_wan", {"vae_stage": True, "chunks_in_flight": 2, "model": MATCHED}, PP2),
        ("causal_wan", {"model": {"cuda_graphs": True}}, PP2),
        ("causal_wan", BANDS, TP2),
        ("lingbot_world", BANDS, TP2),
        ("wan2_2", {"model": {"cfg_parallel": True}}, TP2),
    ],
    ids=str,
)
def test_a_valid_configuration_similar_to_a_refused_one_is_accepted(
    case: Case, folder: Path
) -> None:
    """A valid configuration that is similar to a refused one is accepted, which shows that the
    refused one is not refused for some other reason.
    """
    model, omni, arguments = case
    config = configure(checkpoint(folder, model), omni, arguments)
    assert {name: getattr(config.parallel_config, name) for name in arguments} == arguments
    assert omni.items() <= config.additional_config["omni"].items()


def test_the_tests_named_in_the_entries_exist() -> None:
    """The tests named in the entries exist: both the file and the function."""
    gone = []
    for held in HELD_BY.values():
        file, _, name = held.partition("::")
        path = docs.REPO / file
        if not path.is_file() or (name and not re.search(rf"def {name}\(", path.read_text())):
            gone.append(held)
    assert gone == []
