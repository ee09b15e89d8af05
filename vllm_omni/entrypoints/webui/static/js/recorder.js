// SPDX-License-Identifier: Apache-2.0
// Records the server's own MP4 chunks, each encoded from the exact frames, and joins them into one file to download.
// Nothing is encoded in the browser. Recording begins and ends with a chunk.

import { joinMp4, Mp4Error } from "./mp4.js";

const MAX_BYTES = 512 * 1024 * 1024;

export class Recorder {
  isOn = false;
  isClosing = false; // no further chunks are asked for, but some may still come
  #files = [];
  #bytes = 0;
  #frames = 0;

  /** onfile(blob, numFrames): a finished recording; ontrouble(text). */
  constructor(onfile, ontrouble) {
    this.onfile = onfile;
    this.ontrouble = ontrouble;
  }

  get numFrames() {
    return this.#frames;
  }

  start() {
    [this.isOn, this.isClosing] = [true, false];
    [this.#files, this.#bytes, this.#frames] = [[], 0, 0];
  }

  /** Keep a chunk's MP4, if it brought one. */
  add(file, numFrames) {
    if (!this.isOn || !file) return;
    this.#files.push(file.slice()); // the message it lies in would be kept alive otherwise
    this.#bytes += file.length;
    this.#frames += numFrames;
    if (this.#bytes > MAX_BYTES) {
      this.stop();
      this.ontrouble("The recording was saved: it had become very large.");
    }
  }

  stop() {
    if (!this.isOn) return;
    this.isOn = this.isClosing = false;
    const [files, numFrames] = [this.#files, this.#frames];
    this.#files = [];
    if (files.length === 0) {
      this.ontrouble("Nothing was recorded: no chunk came while recording was on.");
      return;
    }
    try {
      this.onfile(new Blob(joinMp4(files), { type: "video/mp4" }), numFrames);
    } catch (error) {
      if (!(error instanceof Mp4Error)) throw error;
      this.ontrouble(`The recording could not be joined: ${error.message}.`);
    }
  }
}

/** Offer a blob as a download. */
export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export function fileName(extension) {
  return `world-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.${extension}`;
}
