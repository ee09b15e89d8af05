# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible audio output on vLLM's own server: chat with spoken replies, and
text-to-speech.
"""
