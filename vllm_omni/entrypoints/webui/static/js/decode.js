// SPDX-License-Identifier: Apache-2.0
// Decodes the frames of the stream: H.264 access units, or JPEG files. Knows no server and no display.

import { FASTEST_FPS, FragmentPlayer, playsFragments } from "./mse.js";

const PROBED_CODEC = "avc1.42c028"; // Constrained Baseline, as the server encodes; level 4 allows 1920x1080
const MAX_FAILURES = 2; // of the decoder, before H.264 is given up

/** The decoder of H.264 for a world of `fps`: "WebCodecs", which exists only on secure pages, or "MSE"; null = none. */
export async function h264Decoder(fps) {
  if (typeof VideoDecoder !== "undefined") {
    const support = await VideoDecoder.isConfigSupported({ codec: PROBED_CODEC }).catch(() => null);
    if (support?.supported === true) return "WebCodecs";
  }
  return fps <= FASTEST_FPS && playsFragments(PROBED_CODEC) ? "MSE" : null;
}

/** Decode a JPEG file. Resolves to an ImageBitmap; null = it is broken. */
export function decodeJpeg(file) {
  return createImageBitmap(new Blob([file], { type: "image/jpeg" })).catch(() => null);
}

/** Decodes with WebCodecs, as H264Decoder uses it: onframe(timestamp, bitmap), onerror(). */
class WebCodecsDecoder {
  wantsKey = false;
  #decoder;

  constructor(codec, onframe, onerror) {
    const output = async (frame) => {
      // A copy, because a decoder stops while many of its own frames are held.
      const bitmap = await createImageBitmap(frame).catch(() => null);
      onframe(frame.timestamp, bitmap);
      frame.close();
    };
    this.#decoder = new VideoDecoder({ output, error: onerror });
    this.#decoder.configure({ codec, optimizeForLatency: true });
  }

  decode(unit, timestamp) {
    this.#decoder.decode(new EncodedVideoChunk({ type: unit.is_key_frame ? "key" : "delta", timestamp, data: unit.video }));
  }

  close() {
    if (this.#decoder.state !== "closed") this.#decoder.close();
  }
}

const DECODERS = { WebCodecs: WebCodecsDecoder, MSE: FragmentPlayer };

/** Decodes the access units of one stream, in order. */
export class H264Decoder {
  name = "WebCodecs"; // or "MSE", see `h264Decoder`
  needsKey = true; // until a key frame comes, frames are lost: the server should be asked for one
  numFailures = 0;
  #decoder = null;
  #nextFrame = null; // number of the frame that would continue the stream
  #waiting = new Map(); // timestamp -> resolve, of frames that are being decoded
  #timestamp = 0;

  get hasFailed() {
    return this.numFailures >= MAX_FAILURES;
  }

  /** Whether the server should be asked for a key frame: one is needed, or lets the decoder free memory. */
  get wantsKey() {
    return this.needsKey || this.#decoder.wantsKey;
  }

  /** Seconds of the stream that the decoder keeps. */
  get bufferedS() {
    return this.#decoder?.bufferedS ?? 0;
  }

  /**
   * Decode one access unit. unit: {video, is_key_frame, codec_string, first_frame, width, height} as the server sends it.
   * Resolves to an ImageBitmap; null = the frame is lost, because an earlier one is missing or the decoder failed.
   */
  decode(unit) {
    const continues = this.#decoder !== null && unit.first_frame === this.#nextFrame;
    if (unit.is_key_frame) this.#start(unit.codec_string);
    else if (!continues || this.needsKey) {
      this.needsKey = true;
      return Promise.resolve(null);
    }
    this.#nextFrame = unit.first_frame + 1;
    return new Promise((resolve) => {
      const timestamp = this.#timestamp++; // its own numbers, because the server's start again with each world
      this.#waiting.set(timestamp, resolve);
      try {
        this.#decoder.decode(unit, timestamp);
      } catch {
        this.#fail();
      }
    });
  }

  /** Forget the stream. Frames that are being decoded are lost. */
  reset() {
    this.#decoder?.close();
    this.#decoder = this.#nextFrame = null;
    this.needsKey = true;
    for (const resolve of this.#waiting.values()) resolve(null);
    this.#waiting.clear();
  }

  #start(codec) {
    if (this.#decoder === null) {
      const decoder = new DECODERS[this.name](
        codec,
        (timestamp, bitmap) => this.#show(timestamp, bitmap),
        () => decoder === this.#decoder && this.#fail(),
      );
      this.#decoder = decoder;
    }
    this.needsKey = false;
  }

  #show(timestamp, bitmap) {
    const resolve = this.#waiting.get(timestamp);
    this.#waiting.delete(timestamp);
    if (resolve) resolve(bitmap);
    else bitmap?.close();
  }

  #fail() {
    this.numFailures += 1;
    this.reset();
  }
}
