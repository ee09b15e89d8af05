# SPDX-License-Identifier: Apache-2.0
"""Engine access of the front end: requests, ranks, readiness, failure detection and draining."""
