# SPDX-License-Identifier: Apache-2.0
"""The UMT5 text encoder of Wan."""
