# SPDX-License-Identifier: Apache-2.0
"""`/v1/sessions` on a real server: snapshots and refused requests."""

import json

from helpers.fake_engine import FIRST, LATER
from helpers.served import Served
from session_calls import call, code_of, request, signatures


def test_a_snapshot_is_downloaded_and_uploaded(served: Served) -> None:
    """A session that is downloaded, uploaded under two ids and continued over the WebSocket yields
    the same frames as the original session.
    """
    with served.client() as client:
        client.send(request(FIRST + LATER, session_id="origin"))
        client.frames()
        status, snapshot, headers = call(served, "GET", "/v1/sessions/origin/snapshot")
        assert (status, headers["content-type"], headers["x-next-chunk-index"]) == (
            200,
            "application/octet-stream",
            "2",
        )
        assert len(snapshot) == int(headers["content-length"])
        status, body, _ = call(served, "PUT", "/v1/sessions/copy", snapshot)
        reply = json.loads(body)
        assert (status, reply["id"], reply["next_chunk_index"], reply["seed"]) == (
            201,
            "copy",
            2,
            3,
        )
        status, body, _ = call(served, "POST", "/v1/sessions", snapshot)
        third = json.loads(body)["id"]
        assert status == 201
        following = []
        for session_id in ("origin", "copy", third):
            client.send(request(2 * LATER, session_id=session_id, image=None))
            following.append(signatures(client.frames()))
        assert following[0] == following[1] == following[2]
        assert [number for number, _ in following[0]] == [FIRST + LATER, FIRST + 2 * LATER]
        resumed = client.request({"endpoint": "resume", "session_id": "copy", "last_chunk_id": 3})
        assert (resumed["type"], resumed["next_chunk_index"]) == ("resumed", 4)
        for session_id in ("origin", "copy", third):
            assert call(served, "DELETE", f"/v1/sessions/{session_id}")[0] == 204


def test_refusals_over_http_name_their_reason(served: Served) -> None:
    """A refused request has no effect. It gets the right status and, unless the API key is wrong,
    an error code. The other cases are unknown ids, ids in use, damaged snapshots, and snapshots of
    other models or of newer formats.
    """
    with served.client() as client:
        client.send(request(FIRST, session_id="one"))
        client.frames()
        snapshot = call(served, "GET", "/v1/sessions/one/snapshot")[1]
        head = 8 + int.from_bytes(snapshot[:8], "little")
        header = snapshot[8:head]
        foreign = snapshot[:8] + header.replace(b"null_world", b"lost_world") + snapshot[head:]
        newer = (
            snapshot[:8]
            + header.replace(rb"\"format_version\":1", rb"\"format_version\":9")
            + snapshot[head:]
        )
        for method, path, body, status, code in (
            ("GET", "/v1/sessions/nobody/snapshot", None, 404, "unknown_session"),
            ("GET", "/v1/sessions/a%20b/snapshot", None, 404, "unknown_session"),
            ("PUT", "/v1/sessions/one", snapshot, 409, "session_exists"),
            ("PUT", "/v1/sessions/two", snapshot[:-1], 400, "invalid_snapshot"),
            ("PUT", "/v1/sessions/two", b"", 400, "invalid_snapshot"),
            ("PUT", "/v1/sessions/two", b"\x80\x04K\x01.", 400, "invalid_snapshot"),
            ("PUT", "/v1/sessions/two", foreign, 409, "foreign_snapshot"),
            ("PUT", "/v1/sessions/two", newer, 400, "snapshot_version"),
            ("DELETE", "/v1/sessions/two", None, 404, "unknown_session"),
        ):
            got, response, _ = call(served, method, path, body)
            assert (got, code_of(response)) == (status, code), (path, response)
        for headers in ({"X": "y"}, {"Authorization": "Bearer wrong"}):
            assert call(served, "GET", "/v1/sessions/one/snapshot", headers=headers)[0] == 401
        assert call(served, "DELETE", "/v1/sessions/one")[0] == 204
