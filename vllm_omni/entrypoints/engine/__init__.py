# SPDX-License-Identifier: Apache-2.0
"""The front end's side of the engine: requests, ranks, readiness, death and draining."""
