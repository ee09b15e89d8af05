# SPDX-License-Identifier: Apache-2.0
"""Spectators: read-only viewers of a session, who are admitted by a token that the session's owner
shares.
"""
