"""Entry points of vllm_omni; everything else is in pyproject.toml.

All groups use the one name `vllm_omni`, because `VLLM_PLUGINS` filters every group by entry-point
name; `vllm_omni_ar` adds routes to servers of stock text models, which need nothing else of this
package, `vllm_omni_speech` to servers of models that speak.
"""

from setuptools import setup

setup(
    entry_points={
        "vllm.general_plugins": ["vllm_omni = vllm_worlds:register"],
        # silent unless asked for
        "vllm.platform_plugins": ["vllm_omni = vllm_omni.platforms:platform"],
        "vllm.endpoint_plugins": [
            "vllm_omni = vllm_omni.entrypoints.plugin:create_plugin",
            "vllm_omni_ar = vllm_omni.entrypoints.ar_plugin:create_plugin",
            "vllm_omni_speech = vllm_omni.entrypoints.speech.plugin:create_plugin",
        ],
        "console_scripts": [
            "vllm-omni = vllm_worlds:main",
            "vllm-worlds = vllm_worlds:main",  # stays if the other project replaces `vllm-omni`
        ],
    },
)
