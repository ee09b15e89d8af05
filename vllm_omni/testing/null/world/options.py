# SPDX-License-Identifier: Apache-2.0
"""Options of `null_world`. This module imports only lightweight modules."""

import msgspec

from vllm_omni.actions import CAMERA_SPACE, ActionSpace


class NullWorldOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `null_world` under `omni.model`."""

    actions: ActionSpace = CAMERA_SPACE
    """Controls of the model as JSON (`vllm_omni/actions.py`). Tests use other controls to imitate
    other models. Default: the camera keys.
    """
