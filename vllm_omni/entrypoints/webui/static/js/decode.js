// SPDX-License-Identifier: Apache-2.0
// Decodes the frames of the stream: H.264 access units with WebCodecs, or JPEG files. Knows no server and no display.

const PROBED_CODEC = "avc1.42c028"; // Constrained Baseline, as the server encodes; level 4 allows 1920x1080
const MAX_FAILURES = 2; // of the decoder, before H.264 is given up

/** Resolves to whether this browser decodes the server's H.264. WebCodecs exists only on secure pages and localhost. */
export async function decodesH264() {
  if (typeof VideoDecoder === "undefined") return false;
  const support = await VideoDecoder.isConfigSupported({ codec: PROBED_CODEC }).catch(() => null);
  return support?.supported === true;
}

/** Decode a JPEG file. Resolves to an ImageBitmap; null = it is broken. */
export function decodeJpeg(file) {
  return createImageBitmap(new Blob([file], { type: "image/jpeg" })).catch(() => null);
}

/** Decodes the access units of one stream, in order. */
export class H264Decoder {
  needsKey = true; // until a key frame comes, frames are lost: the server should be asked for one
  numFailures = 0;
  #decoder = null;
  #nextFrame = null; // number of the frame that would continue the stream
  #waiting = new Map(); // timestamp -> resolve, of frames that are being decoded
  #timestamp = 0;

  get hasFailed() {
    return this.numFailures >= MAX_FAILURES;
  }

  /**
   * Decode one access unit. unit: {video, is_key_frame, codec_string, first_frame} as the server sends it.
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
        const type = unit.is_key_frame ? "key" : "delta";
        this.#decoder.decode(new EncodedVideoChunk({ type, timestamp, data: unit.video }));
      } catch {
        this.#fail();
      }
    });
  }

  /** Forget the stream. Frames that are being decoded are lost. */
  reset() {
    if (this.#decoder !== null && this.#decoder.state !== "closed") this.#decoder.close();
    this.#decoder = this.#nextFrame = null;
    this.needsKey = true;
    for (const resolve of this.#waiting.values()) resolve(null);
    this.#waiting.clear();
  }

  #start(codec) {
    if (this.#decoder === null) {
      const decoder = new VideoDecoder({
        output: (frame) => this.#show(frame),
        error: () => decoder === this.#decoder && this.#fail(),
      });
      this.#decoder = decoder;
      this.#decoder.configure({ codec, optimizeForLatency: true });
    }
    this.needsKey = false;
  }

  async #show(frame) {
    const resolve = this.#waiting.get(frame.timestamp);
    this.#waiting.delete(frame.timestamp);
    // A copy, because a decoder stops while many of its own frames are held.
    const bitmap = await createImageBitmap(frame).catch(() => null);
    frame.close();
    if (resolve) resolve(bitmap);
    else bitmap?.close();
  }

  #fail() {
    this.numFailures += 1;
    this.reset();
  }
}
