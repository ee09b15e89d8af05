# SPDX-License-Identifier: Apache-2.0
"""Tests of environments over HTTP: gymnasium's environment checks, equality with an offline
environment's results, and refusals.

The server listens on real sockets. Its engine is either a LingBot World in this process or a fake
engine.
"""

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import helpers.needs_gymnasium  # noqa: F401
import msgspec
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from helpers.fake_engine import FIRST, LATER, EndpointServer, FakeEngine
from helpers.waits import wait_until
from in_process_llm import InProcessLLM

from vllm_omni.entrypoints.limits.quotas import FileQuotas, Quota, QuotaFile
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.environments.remote import RemoteEngine
from vllm_omni.environments.world import WorldEnv, WorldVectorEnv
from vllm_omni.outputs import RequestFailed

SIZE = {"height": 32, "width": 48}
IMAGE = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
WORLD: dict[str, Any] = {"prompt": "a village", "image": IMAGE, **SIZE}
Serve = Callable[..., EndpointServer]


@pytest.fixture(scope="module")
def llm(lingbot_world: Path) -> Any:
    return InProcessLLM(lingbot_world, {**SIZE, "max_sessions": 8})


@pytest.fixture
def world_url(llm: Any) -> Iterator[str]:
    info = StreamInfo.from_vllm_config(llm.llm_engine.vllm_config, model="world")
    with EndpointServer(llm.client, EndpointLimits(), info) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Yield a function, called as `serve(info={...}, **limits)`, that starts a server with a fake
    engine.
    """
    with ExitStack() as stack:

        def start(info: dict[str, Any] | None = None, **limits: Any) -> EndpointServer:
            world = StreamInfo(**{**SIZE, "max_sessions": 8, **(info or {})})
            return stack.enter_context(
                EndpointServer(FakeEngine(), EndpointLimits(**limits), world)
            )

        yield start


def connect(server: EndpointServer, count: int = 2, **options: Any) -> WorldVectorEnv:
    options = {**WORLD, "latents": False, **options}
    return WorldVectorEnv.connect(f"http://127.0.0.1:{server.port}", count, **options)


def rest(env: WorldVectorEnv) -> dict[str, np.ndarray]:
    return {"buttons": np.zeros((env.num_envs, len(env.model_actions.buttons)), np.int8)}


def walk(env: WorldVectorEnv, steps: int = 2) -> list[np.ndarray | dict[str, Any]]:
    """Return the observations and infos from a reset and `steps` random steps."""
    env.action_space.seed(3)
    seen: list[Any] = [*env.reset(seed=5)]
    for _ in range(steps):
        observations, *_, infos = env.step(env.action_space.sample())
        seen += [observations, infos]
    return seen


@pytest.mark.parametrize("observation", ["frames", "latents"])
def test_a_remote_environment_has_the_bits_of_an_offline_one(
    observation: Any, llm: Any, world_url: str
) -> None:
    """A remote environment produces the same results as an offline environment, bit for bit.

    The test compares frames, latents, trajectories, forks and replays.
    """
    options: Any = {**WORLD, "observation": observation, "trajectory": True}
    offline = WorldVectorEnv(llm, 2, **options)
    remote = WorldVectorEnv.connect(world_url, 2, **options)
    assert remote.observation_space == offline.observation_space
    assert remote.action_space == offline.action_space
    for ours, theirs in zip(walk(remote), walk(offline), strict=True):
        np.testing.assert_equal(ours, theirs)
    last = remote._observations()[1]
    remote.fork(1, [0])
    assert np.array_equal(remote._observations()[0], last)
    steps = [env.step(rest(env))[0] for env in (remote, offline)]
    assert np.array_equal(steps[0][0], steps[0][1])
    assert np.array_equal(steps[0][1], steps[1][1])
    episode = remote.episodes[1]
    assert episode is not None
    assert np.array_equal(remote.replay(0, episode), offline.replay(0, episode))
    for env in (remote, offline):
        env.close()
    wait_until(lambda: not llm.sessions)  # the engine frees the sessions after it has responded


def test_gymnasium_accepts_the_environment(world_url: str) -> None:
    env = WorldEnv.connect(world_url, **WORLD)
    check_env(env)


def test_a_trajectory_has_the_log_probability_of_each_draw(llm: Any) -> None:
    """A trajectory contains the log-probability of each sampled latent.

    The latents after a step are Gaussian with mean (1 - sigma) x0. A trajectory starts with the
    seed's noise and ends with the latents of the result.
    """
    from vllm_omni.model_executor.schedules import standard_normal

    env = WorldVectorEnv(llm, 1, trajectory=True, **WORLD)
    infos = [env.reset(seed=4)[1], env.step(rest(env))[-1]][1]
    steps, log_probs = infos["step_latents"][0], infos["step_log_probs"][0]
    sigmas = llm.model.schedule.sigmas_noise
    assert len(steps) == len(sigmas) == len(log_probs) + 1
    shape = steps.shape[1:]
    assert np.array_equal(steps[0], standard_normal(shape, 4, 1, 0).numpy())
    for step, log_prob in enumerate(log_probs):
        sigma, drawn = sigmas[step + 1], standard_normal(shape, 4, 1, step + 1).double()
        after = torch.from_numpy(steps[step + 1]).double()
        mean = after - sigma * drawn
        expected = torch.distributions.Normal(mean, sigma).log_prob(after).sum()
        assert log_prob == pytest.approx(float(expected), rel=1e-9)
    env.close()


def test_a_client_imports_no_vllm() -> None:
    code = "import sys, vllm_omni.environments.world; print('vllm' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n", ran.stderr


def test_environments_are_stepped_together_and_freed(serve: Serve) -> None:
    """The engine steps all environments concurrently. Closing the environments closes their
    sessions.
    """
    server = serve()
    server.engine.delay_s = 0.05
    env = connect(server, 4, max_steps=2)
    assert env.reset(seed=1)[0][0, :, 1, 1, 0].tolist() == [0] * (LATER - FIRST) + [*range(FIRST)]
    seen = [env.step(rest(env)) for _ in range(3)]
    assert [list(step[3]) for step in seen] == [[False] * 4, [True] * 4, [False] * 4]
    assert seen[2][4]["chunks"].tolist() == [1] * 4
    assert server.engine.most_running == 4
    assert server.manager.held_bytes == IMAGE.nbytes
    env.close()
    assert len(server.manager) == server.manager.held_bytes == 0


def test_a_start_pose_reaches_the_engine(serve: Serve) -> None:
    server = serve()
    env = connect(server, 1)
    start = {"x_m": 1.0, "z_m": 2.0, "heading_degrees": 90.0}
    env.reset(options={"start_pose": start})
    env.step(rest(env))
    options = [call.params.options for call in server.engine.chunks]
    assert options == [{"start_pose": {**start, "pitch_degrees": 0.0}}, {}]
    assert server.engine.chunks[0].arrays["image"].tobytes() == IMAGE.tobytes()


def test_a_client_cannot_touch_the_environments_of_another(serve: Serve) -> None:
    server = serve()
    mine, other = connect(server, api_key="mine"), connect(server, api_key="other")
    mine.reset(seed=1)
    other._engine._id = mine._engine._id  # type: ignore[attr-defined]
    with pytest.raises(RequestFailed, match="unknown_environment: you have no such"):
        other.reset(seed=1)
    other.close()  # a client ignores refusals while closing
    assert mine.step(rest(mine))[4]["chunks"].tolist() == [2, 2]


@pytest.mark.parametrize("request_", ["fork", "reset"])
def test_environments_that_are_closed_during_a_request_leave_no_session(
    request_: str, serve: Serve
) -> None:
    """Closing environments also frees the sessions that a running request is still creating."""
    server = serve()
    env, closing = connect(server, 4), connect(server, 1)
    env.reset(seed=1)
    server.engine.delay_s = server.engine.close_delay_s = 0.1
    closing._engine._id = env._engine._id  # type: ignore[attr-defined]
    calls = len(server.engine.calls)
    with ThreadPoolExecutor(1) as pool:
        work = {"fork": lambda: env.fork(0, [1, 2, 3]), "reset": lambda: env.reset(seed=2)}
        running = pool.submit(work[request_])
        wait_until(lambda: len(server.engine.calls) > calls)
        closing._engine.close()
        running.exception()
    wait_until(lambda: not server.engine.worlds and len(server.manager) == 0)


def test_forgotten_environments_are_closed(serve: Serve) -> None:
    """Environments that receive no request for `session_idle_s` seconds are closed. The response to
    their client's next request states the reason.
    """
    server = serve({"session_idle_s": 0.2})
    env = connect(server)
    env.reset(seed=1)
    wait_until(lambda: len(server.manager) == server.manager.held_bytes == 0)
    with pytest.raises(RequestFailed, match=r"unknown_environment: .* after 0.2 s without"):
        env.step(rest(env))


def test_an_evicted_session_needs_a_reset(serve: Serve) -> None:
    """If an environment's session is evicted, the environment must be reset before it can be
    stepped again.

    The other environments still complete the step.
    """
    server = serve()
    env = connect(server)
    env.reset(seed=1)
    lost = server.engine.chunks[1].params.session_id
    server.engine.worlds.pop(lost)
    with pytest.raises(RequestFailed, match=r"out_of_order|session_evicted|unknown_session"):
        env.step(rest(env))
    assert (env.episodes[0] is None) != (env.episodes[1] is None)
    env.reset(seed=1, options={"reset_mask": [episode is None for episode in env.episodes]})
    assert sorted(env.step(rest(env))[4]["chunks"].tolist()) == [2, 3]


def test_a_step_is_never_made_twice(serve: Serve) -> None:
    """No step is generated twice: a repeated request names a chunk that already exists, so the
    request is refused.
    """
    env = connect(serve(), 1)
    env.reset(seed=1)
    episode = env.episodes[0]
    assert episode is not None
    first = env._engine.advance([0], [episode], [_idle()])
    assert not isinstance(first[0], RequestFailed)
    with pytest.raises(RequestFailed, match="out_of_order: chunk_index 1 arrived"):
        env._engine.advance([0], [episode], [_idle()])


def _idle() -> Any:
    from vllm_omni.actions import ActionFrame

    return ActionFrame()


def test_a_connection_that_the_server_has_closed_is_opened_again(serve: Serve) -> None:
    server = serve()
    server.server.config.timeout_keep_alive = 0
    env = connect(server, 1)
    env.reset(seed=1)
    wait_until(lambda: not server.server.server_state.connections)
    assert env.step(rest(env))[4]["chunks"].tolist() == [2]


def test_chunks_and_bytes_are_charged(serve: Serve) -> None:
    server = serve()
    limits = Quota(chunks_per_minute=4, bytes_per_minute=1 << 30)
    server.manager.quotas = FileQuotas(QuotaFile(default=limits), clock=lambda: 0.0)
    env = connect(server)
    env.reset(seed=1)
    env.step(rest(env))
    with pytest.raises(RequestFailed, match="quota_exceeded: your quota is 4 chunks a minute"):
        env.step(rest(env))


@pytest.mark.parametrize(
    ("count", "options", "limits", "said"),
    [
        (9, {}, {}, "at most 8 sessions, but 9 environments"),
        (3, {}, {"sessions_per_client": 2}, "session_limit: you may have 2 environments"),
        (1, {"image": None}, {}, "missing_image"),
        (1, {"height": 40}, {}, "unsupported_size"),
        (1, {"images": {"head": IMAGE}}, {}, "invalid_image: unknown images head"),
        (1, {"image": np.zeros((9, 9, 3), np.uint8)}, {"max_image_pixels": 80}, "image_too_large"),
    ],
)
def test_environments_that_do_not_fit_are_refused(
    count: int, options: dict[str, Any], limits: dict[str, Any], said: str, serve: Serve
) -> None:
    server = serve(None, **limits)
    with pytest.raises((RequestFailed, ValueError), match=said):
        connect(server, count, **options)
    assert server.manager.held_bytes == 0


def test_a_full_server_refuses_more(serve: Serve) -> None:
    server = serve()
    env = connect(server, 6, api_key="mine")
    with pytest.raises(RequestFailed, match="capacity: 6 of 8 environments are in use"):
        connect(server, 3, api_key="other")
    env.close()
    connect(server, 3, api_key="other").close()


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("", b"[]", 400, "must be a JSON object"),
        ("", b'{"num_envs": 0}', 400, "num_envs"),
        ("", b'{"num_envs": 1, "imag": 1}', 400, "unknown field"),
        ("", b'{"num_envs": 1, "image": "http://elsewhere/a.png"}', 400, "data: URL"),
        ("/ID/step", b'{"steps": []}', 400, "length >= 1"),
        ("/ID/step", b'{"steps": [{"environment": 2, "chunk_index": 1}]}', 400, "from 0 to 1"),
        ("/ID/step", b" " * (1 + (1 << 20)), 413, "larger than"),
        (
            "/ID/step",
            b'{"steps": [%s, %s]}' % ((b'{"environment": 0, "chunk_index": 1}',) * 2),
            400,
            "different numbers",
        ),
        ("/ID/step", b'{"steps": [{"environment": 0, "chunk_index": 1}]}', 400, "reset it"),
        ("/ID/reset", b'{"episodes": [{"environment": 0, "seed": -2}]}', 400, "seed"),
        ("/ID/fork", b'{"source": 0, "targets": [1]}', 400, "reset it"),
        ("/other/step", b'{"steps": []}', 404, "no such environments"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(
    path: str, body: bytes, status: int, said: str, serve: Serve
) -> None:
    server = serve()
    env = connect(server)
    assert isinstance(env._engine, RemoteEngine)
    path = path.replace("ID", str(env._engine._id))
    url = f"http://127.0.0.1:{server.port}/v1/environments{path}"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == status
    assert said in msgspec.json.decode(refused.value.read())["error"]["message"]


def test_a_refused_reset_does_not_end_the_episode(serve: Serve) -> None:
    """After a reset without the prompt that the model requires, the episode continues."""
    server = serve()
    env = connect(server, 1)
    env.reset(seed=1)
    assert isinstance(env._engine, RemoteEngine)
    url = f"http://127.0.0.1:{server.port}/v1/environments/{env._engine._id}/reset"
    body = b'{"episodes": [{"environment": 0}]}'
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 400
    assert "needs a prompt" in msgspec.json.decode(refused.value.read())["error"]["message"]
    assert env.step(rest(env))[4]["chunks"].tolist() == [2]


def test_one_request_of_a_client_runs_at_a_time(serve: Serve) -> None:
    server = serve()
    env = connect(server, 1)
    env.reset(seed=1)
    server.engine.delay_s = 0.5
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(env.step, rest(env))
        wait_until(lambda: server.engine.running == 1)
        second = RemoteEngine(f"http://127.0.0.1:{server.port}")
        second._id = env._engine._id  # type: ignore[attr-defined]
        episode = env.episodes[0]
        assert episode is not None
        with pytest.raises(RequestFailed, match="session_busy"):
            second.advance([0], [episode], [_idle()])
        assert running.result()[4]["chunks"].tolist() == [2]
