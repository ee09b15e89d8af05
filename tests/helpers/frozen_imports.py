# SPDX-License-Identifier: Apache-2.0
"""What was imported before this module is left out of garbage collections, here and in processes
forked from here.

vLLM collects five times while an engine starts and ends, 0.2 to 0.8 s each if all that is imported
is looked through.
Held by tests/test_quick_spawn.py.
"""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # native libraries complain about what is never collected
