# SPDX-License-Identifier: Apache-2.0
"""Sessions that outlive their connection: state, delivery, recording, snapshots and migration."""
