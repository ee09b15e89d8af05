# SPDX-License-Identifier: Apache-2.0
"""Start images of Wan models."""
