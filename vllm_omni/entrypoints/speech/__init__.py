# SPDX-License-Identifier: Apache-2.0
"""OpenAI's audio output on vLLM's own server: chat with speech, and text-to-speech."""
