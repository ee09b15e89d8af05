# SPDX-License-Identifier: Apache-2.0
"""Read-only viewers of a session, admitted by a token that its owner shares."""
