# SPDX-License-Identifier: Apache-2.0
"""Tests of private attributes of aiortc that the WebRTC endpoint uses."""

import inspect

from helpers.needs_aiortc import aiortc


def test_a_sender_handles_feedback_in_the_method_that_is_wrapped() -> None:
    """The transport looks up `_handle_rtcp_packet` on the sender instance, so an instance attribute
    can replace the method.
    """
    sender, transport = aiortc.rtcrtpsender, aiortc.rtcdtlstransport
    source = inspect.getsource(sender.RTCRtpSender._handle_rtcp_packet)
    assert "self._send_keyframe()" in source
    assert "unpack_remb_fci(packet.fci)" in source
    assert "._handle_rtcp_packet(packet)" in inspect.getsource(transport.RTCDtlsTransport)


def test_packets_of_a_track_are_sent_without_encoding() -> None:
    """A track can return encoded packets. aiortc splits these for RTP but does not encode them
    again.
    """
    source = inspect.getsource(aiortc.rtcrtpsender.RTCRtpSender._next_encoded_frame)
    assert "self.__encoder.pack(data)" in source
