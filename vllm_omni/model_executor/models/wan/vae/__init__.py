# SPDX-License-Identifier: Apache-2.0
"""The Wan VAE, streamed, and its tiny replacement."""
