"""Declare the entry points of vllm_omni. All other package settings are in pyproject.toml.

The entry points in all groups have the name `vllm_omni`, because `VLLM_PLUGINS` filters every group
by name. There are two exceptions: `vllm_omni_ar` adds routes to servers of stock text models, which
need nothing else from this package, and `vllm_omni_speech` adds routes to servers of speech models.
"""

from setuptools import setup

setup(
    entry_points={
        "vllm.general_plugins": ["vllm_omni = vllm_worlds:register"],
        # has no effect unless it is selected
        "vllm.platform_plugins": ["vllm_omni = vllm_omni.platforms:platform"],
        "vllm.endpoint_plugins": [
            "vllm_omni = vllm_omni.entrypoints.plugin:create_plugin",
            "vllm_omni_ar = vllm_omni.entrypoints.ar_plugin:create_plugin",
            "vllm_omni_speech = vllm_omni.entrypoints.speech.plugin:create_plugin",
        ],
        "console_scripts": [
            "vllm-omni = vllm_worlds:main",
            "vllm-worlds = vllm_worlds:main",  # remains if the other project replaces `vllm-omni`
        ],
    },
)
