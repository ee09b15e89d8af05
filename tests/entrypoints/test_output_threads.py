# SPDX-License-Identifier: Apache-2.0
"""A script that does not close its `LLM` exits normally, because the interpreter waits for the
thread that receives results.
"""

import subprocess
import sys

from helpers.waits import seconds

SCRIPT = """
import threading, time, weakref
import vllm_omni

vllm_omni.register()
told = threading.Event()

def receive():
    told.wait()
    time.sleep(0.3)  # while it frees the last result, in vLLM's
    print("ended", flush=True)

class Client:
    pass

client = Client()  # freed by nobody but the interpreter's exit
weakref.finalize(client, told.set)
threading.Thread(target=receive, name="EngineCoreOutputQueueThread", daemon=True).start()
"""


def test_the_interpreter_waits_for_the_thread_that_receives_results() -> None:
    """The interpreter waits for a thread that has the same name as vLLM's result thread and, as in
    vLLM, is stopped by a finalizer.
    """
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=seconds(120),
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.endswith("ended\n")
