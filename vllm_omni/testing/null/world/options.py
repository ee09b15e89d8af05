# SPDX-License-Identifier: Apache-2.0
"""Options of `null_world`: which controls it takes. Imports nothing heavy."""

import msgspec

from vllm_omni.actions import CAMERA_SPACE, ActionSpace


class NullWorldOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """actions: an `ActionSpace` (vllm_omni/actions.py) as JSON, so that tests can stand for any
    model's controls.
    """

    actions: ActionSpace = CAMERA_SPACE
