// SPDX-License-Identifier: Apache-2.0
// Decodes H.264 with Media Source Extensions, for pages without WebCodecs: browsers offer WebCodecs over HTTPS and on
// localhost only. Each access unit becomes a fragment of an MP4 (ISO/IEC 14496-12) that a <video> outside of the page plays.
//
// One frame at a time is in the <video>, because `requestVideoFrameCallback` would otherwise report one frame and show the
// next. A frame lasts two refreshes of a 60-Hz screen, because browsers may skip shorter ones.

import { box, full } from "./mp4.js";

const FRAME_MS = 33; // of the <video>'s clock, not of the world's
const LATE_MS = 400; // after which a frame that is not reported is sought
const GIVEN_UP_MS = 5000; // after which a frame that is not found will not come
const BYTES_PER_KEY = 4 << 20; // the buffer can only be cut at a key frame, and holds some 100 MB
const FRAMES_PER_KEY = 480; // seeking decodes all of them

export const FASTEST_FPS = 1000 / FRAME_MS - 5; // of a world, so that a frame that is late is caught up

/** Whether this browser plays H.264 of this MIME type by Media Source Extensions, and reports the frames. */
export function playsFragments(codec) {
  const reports = "requestVideoFrameCallback" in HTMLVideoElement.prototype;
  return reports && globalThis.MediaSource?.isTypeSupported(mimeType(codec)) === true;
}

const mimeType = (codec) => `video/mp4; codecs="${codec}"`;

/** A decoder as H264Decoder uses it: onframe(timestamp, bitmap), onerror(). */
export class FragmentPlayer {
  #video = Object.assign(document.createElement("video"), { muted: true, playsInline: true });
  #source = new MediaSource();
  #buffer = null;
  #url = URL.createObjectURL(this.#source);
  #units = []; // that wait
  #current = null; // {timestamp, timeMs, fedAt, isSought} of the unit in the <video>
  #numFragments = 0;
  #keyFragment = 0; // of the last key frame
  #bytes = 0; // since then
  #cutMs = 0; // what is before it is removed next
  #timer = null;
  #isClosed = false;

  constructor(codec, onframe, onerror) {
    this.onframe = onframe;
    this.onerror = onerror;
    this.#source.addEventListener("sourceopen", () => this.#open(codec), { once: true });
    this.#video.addEventListener("error", () => this.#fail());
    this.#video.src = this.#url;
    const report = (_, { mediaTime }) => {
      if (this.#isClosed) return;
      this.#video.requestVideoFrameCallback(report);
      if (this.#current !== null && Math.round(mediaTime * 1000) === this.#current.timeMs) this.#take();
    };
    this.#video.requestVideoFrameCallback(report);
  }

  /** Whether the buffer should be cut soon. */
  get wantsKey() {
    return this.#bytes > BYTES_PER_KEY || this.#numFragments - this.#keyFragment > FRAMES_PER_KEY;
  }

  /** Seconds that the buffer holds. */
  get bufferedS() {
    const ranges = this.#buffer?.buffered;
    return ranges?.length ? ranges.end(ranges.length - 1) - ranges.start(0) : 0;
  }

  decode(unit, timestamp) {
    this.#units.push({ ...unit, timestamp });
    this.#feed();
  }

  close() {
    this.#isClosed = true;
    clearTimeout(this.#timer);
    this.#video.removeAttribute("src");
    this.#video.load();
    URL.revokeObjectURL(this.#url);
  }

  #open(codec) {
    if (this.#isClosed) return;
    this.#buffer = this.#source.addSourceBuffer(mimeType(codec));
    this.#buffer.addEventListener("updateend", () => this.#feed());
    this.#feed();
  }

  #feed() {
    if (this.#isClosed || this.#buffer === null || this.#buffer.updating || this.#current !== null) return;
    if (this.#cutMs > 0) {
      this.#buffer.remove(0, this.#cutMs / 1000);
      this.#cutMs = 0;
      return;
    }
    const unit = this.#units.shift();
    if (unit === undefined) return;
    const timeMs = FRAME_MS * this.#numFragments++;
    this.#current = { timestamp: unit.timestamp, timeMs, fedAt: performance.now(), isSought: false };
    if (unit.is_key_frame) [this.#keyFragment, this.#bytes, this.#cutMs] = [this.#numFragments, 0, timeMs];
    this.#bytes += unit.video.length;
    try {
      this.#buffer.appendBuffer(segmentOf(unit, this.#numFragments, timeMs));
    } catch {
      return this.#fail(); // the quota, or an access unit without what it needs
    }
    if (this.#video.paused) this.#video.play().catch(() => {}); // a browser may pause it in a hidden page
    this.#watch();
  }

  /** A browser may wait for a later frame, for example after it was hidden. Seeking makes it show the frame. */
  #watch() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      if (this.#current === null || this.#isClosed) return;
      const { fedAt, timeMs, isSought } = this.#current;
      if (document.hidden) this.#current.fedAt = performance.now();
      else if (performance.now() - fedAt > GIVEN_UP_MS) return this.#fail();
      else if (!isSought) {
        this.#current.isSought = true;
        this.#video.currentTime = (timeMs + FRAME_MS / 2) / 1000;
      } else if (!this.#video.seeking && this.#video.readyState >= 2) return this.#take();
      this.#watch();
    }, LATE_MS);
  }

  #take() {
    const { timestamp } = this.#current;
    clearTimeout(this.#timer);
    createImageBitmap(this.#video).then(
      (bitmap) => (this.#isClosed ? bitmap.close() : this.onframe(timestamp, bitmap)),
      () => this.#fail(),
    );
    this.#current = null;
    this.#feed();
  }

  #fail() {
    if (!this.#isClosed) this.onerror();
  }
}

// ---- boxes --------------------------------------------------------------------------------------------------------

const TRACK = 1;
const [SPS, PPS] = [7, 8]; // types of NAL units
const KEY_SAMPLE = 0x2000000;
const OTHER_SAMPLE = 0x1010000;
const UNITY = [0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000];

/** The fragment of one access unit; before a key frame also an initialization segment. Times are in milliseconds. */
function segmentOf({ video, is_key_frame: isKey, width, height }, number, timeMs) {
  const nals = nalUnits(video);
  const of = (type) => nals.find((nal) => (nal[0] & 31) === type);
  const init = isKey ? initSegment(width, height, of(SPS), of(PPS)) : [];
  const samples = nals.filter((nal) => ![SPS, PPS].includes(nal[0] & 31));
  const data = box("mdat", samples.flatMap((nal) => [u32(nal.length), nal]));
  const run = (offset) => full("trun", 0x701, [1, offset, FRAME_MS, data.length - 8, isKey ? KEY_SAMPLE : OTHER_SAMPLE]);
  const traf = (offset) => box("traf", [full("tfhd", 0x20000, [TRACK]), full("tfdt", 0, [timeMs]), run(offset)]);
  const moof = (offset) => box("moof", [full("mfhd", 0, [number]), traf(offset)]);
  const parts = [...init, moof(moof(0).length + 8), data];
  return box("free", parts).subarray(8); // joined, without the header
}

/** NAL units of an Annex-B access unit. */
function nalUnits(unit) {
  const starts = [];
  for (let at = unit.indexOf(1, 2); at >= 0; at = unit.indexOf(1, at + 1)) {
    if (unit[at - 1] === 0 && unit[at - 2] === 0) starts.push(at + 1);
  }
  return starts.map((start, i) => {
    let end = i + 1 < starts.length ? starts[i + 1] - 3 : unit.length;
    while (unit[end - 1] === 0) end--; // a NAL unit never ends with a zero
    return unit.subarray(start, end);
  });
}

function initSegment(width, height, sps, pps) {
  const avcC = box("avcC", [
    [1, sps[1], sps[2], sps[3], 0xff, 0xe1, ...u16(sps.length), ...sps, 1, ...u16(pps.length), ...pps],
  ]);
  const entry = [...zeros(6), ...u16(1), ...zeros(16), ...u16(width), ...u16(height)];
  entry.push(...u32(72 << 16), ...u32(72 << 16), ...zeros(4), ...u16(1), ...zeros(32), ...u16(24), ...u16(0xffff));
  const avc1 = box("avc1", [entry, avcC]);
  const tables = ["stts", "stsc", "stco"].map((type) => full(type, 0, [0]));
  const stbl = box("stbl", [box("stsd", [u32(0), u32(1), avc1]), ...tables, full("stsz", 0, [0, 0])]);
  const dinf = box("dinf", [box("dref", [u32(0), u32(1), full("url ", 1, [])])]);
  const minf = box("minf", [full("vmhd", 1, [0, 0]), dinf, stbl]);
  const hdlr = box("hdlr", [zeros(8), [..."vide"].map((letter) => letter.charCodeAt(0)), zeros(13)]);
  const mdia = box("mdia", [full("mdhd", 0, [0, 0, 1000, 0, 0x55c40000]), hdlr, minf]);
  const tkhd = full("tkhd", 3, [0, 0, TRACK, 0, 0, 0, 0, 0, 0, ...UNITY, width << 16, height << 16]);
  const mvhd = full("mvhd", 0, [0, 0, 1000, 0, 0x10000, 0x1000000, 0, 0, ...UNITY, 0, 0, 0, 0, 0, 0, TRACK + 1]);
  const mvex = box("mvex", [full("trex", 0, [TRACK, 1, 0, 0, 0])]); // no duration: the browser then plays it as live
  return [full("ftyp", 0x69736f35, [0]), box("moov", [mvhd, box("trak", [tkhd, mdia]), mvex])]; // brand iso5
}

const zeros = (count) => new Array(count).fill(0);
const u16 = (value) => [value >> 8, value & 255];
const u32 = (value) => [value >>> 24, (value >> 16) & 255, (value >> 8) & 255, value & 255];
