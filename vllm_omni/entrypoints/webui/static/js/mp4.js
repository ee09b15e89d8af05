// SPDX-License-Identifier: Apache-2.0
// Joins the server's MP4 chunks (each a file of its own: one H.264 track) into one file, without decoding anything.
// The result has its index in front. Box layouts: ISO/IEC 14496-12.

export class Mp4Error extends Error {}

const IDENTITY_RATE = 0x00010000;
const VISUAL_ENTRY_BYTES = 78; // fixed fields of a VisualSampleEntry, before its boxes

/** Join files of equal size, frame rate and codec settings; returns Uint8Array parts for a Blob. Throws Mp4Error. */
export function joinMp4(files) {
  if (files.length === 0) throw new Mp4Error("nothing to join");
  const clips = files.map(readClip);
  const first = clips[0];
  for (const clip of clips) {
    if (clip.timescale !== first.timescale) throw new Mp4Error("the frame rate changes");
    if (!equal(clip.stsd, first.stsd)) throw new Mp4Error("the picture size or codec changes");
  }
  const data = clips.flatMap((clip) => clip.samples.map((sample) => sample.data));
  const dataBytes = data.reduce((sum, part) => sum + part.length, 0);
  if (dataBytes > 0xf0000000) throw new Mp4Error("more than 4 GB");
  const measured = writeMoov(clips, 0).length; // its size does not depend on where the data lies
  const start = first.ftyp.length + measured + 8;
  return [first.ftyp, writeMoov(clips, start), box("mdat", [], dataBytes), ...data];
}

// ---- reading ------------------------------------------------------------------------------------------------------

function readClip(file) {
  const top = children(file, 0, file.length);
  const moov = one(top, "moov");
  const trak = one(moov, "trak");
  const mdia = one(trak, "mdia");
  const minf = one(mdia, "minf");
  const stbl = one(minf, "stbl");
  const mdhd = one(mdia, "mdhd");
  return {
    ftyp: one(top, "ftyp").raw,
    mvhd: one(moov, "mvhd"),
    tkhd: one(trak, "tkhd"),
    mdhd,
    hdlr: one(mdia, "hdlr").raw,
    minfRest: inside(minf).filter(({ type }) => type !== "stbl").map(({ raw }) => raw),
    stsd: readDescription(one(stbl, "stsd").body),
    timescale: timescaleOf(mdhd),
    movieTimescale: timescaleOf(one(moov, "mvhd")),
    mediaTime: mediaTimeOf(trak),
    samples: readSamples(file, stbl),
  };
}

/** The sample description without its bit rates (`btrt`), which differ from clip to clip and decide nothing. */
function readDescription(body) {
  const entries = children(body, 8, body.length);
  if (entries.length !== 1 || !entries[0].type.startsWith("avc")) throw new Mp4Error("not one H.264 track");
  const [{ type, body: entry }] = entries;
  const kept = children(entry, VISUAL_ENTRY_BYTES, entry.length).filter((child) => child.type !== "btrt");
  const fields = entry.subarray(0, VISUAL_ENTRY_BYTES);
  return box("stsd", [body.subarray(0, 8), box(type, [fields, ...kept.map(({ raw }) => raw)])]);
}

function readSamples(file, stbl) {
  const sizes = readSizes(one(stbl, "stsz").body);
  const offsets = readOffsets(stbl, sizes);
  const durations = expand(one(stbl, "stts").body, sizes.length);
  const ctts = find(stbl, "ctts");
  const shifts = ctts ? expand(ctts.body, sizes.length, true) : sizes.map(() => 0);
  const stss = find(stbl, "stss");
  const sync = stss ? new Set(numbers(stss.body, 8, u32(stss.body, 4))) : null;
  return sizes.map((size, i) => {
    if (offsets[i] + size > file.length) throw new Mp4Error("the file ends early");
    return {
      data: file.subarray(offsets[i], offsets[i] + size),
      duration: durations[i],
      shift: shifts[i],
      sync: sync === null || sync.has(i + 1),
    };
  });
}

function readSizes(body) {
  const [same, count] = [u32(body, 4), u32(body, 8)];
  return same ? new Array(count).fill(same) : numbers(body, 12, count);
}

function readOffsets(stbl, sizes) {
  const stco = one(stbl, "stco").body;
  const chunks = numbers(stco, 8, u32(stco, 4));
  const stsc = one(stbl, "stsc").body;
  const runs = Array.from({ length: u32(stsc, 4) }, (_, i) => [u32(stsc, 8 + 12 * i), u32(stsc, 12 + 12 * i)]);
  const offsets = [];
  chunks.forEach((start, index) => {
    const count = runs.findLast(([firstChunk]) => firstChunk <= index + 1)[1];
    let at = start;
    for (let i = 0; i < count && offsets.length < sizes.length; i++) {
      offsets.push(at);
      at += sizes[offsets.length - 1];
    }
  });
  if (offsets.length !== sizes.length) throw new Mp4Error("samples without a place");
  return offsets;
}

function expand(body, count, signed = false) {
  const values = [];
  for (let i = 0; i < u32(body, 4); i++) {
    const [times, value] = [u32(body, 8 + 8 * i), u32(body, 12 + 8 * i)];
    for (let j = 0; j < times; j++) values.push(signed ? value | 0 : value);
  }
  if (values.length !== count) throw new Mp4Error("the sample tables disagree");
  return values;
}

function mediaTimeOf(trak) {
  const edts = find(trak, "edts");
  if (!edts) return 0;
  const { body } = one(edts, "elst");
  const wide = body[0] === 1;
  for (let i = 0; i < u32(body, 4); i++) {
    const at = 8 + i * (wide ? 20 : 12);
    const time = wide ? u32(body, at + 12) : u32(body, at + 4) | 0;
    if (time >= 0) return time;
  }
  return 0;
}

const timescaleOf = ({ body }) => u32(body, body[0] === 1 ? 20 : 12);

// ---- writing ------------------------------------------------------------------------------------------------------

function writeMoov(clips, dataStart) {
  const first = clips[0];
  // Clips may hold their first picture back by different times; the longest counts for all.
  const mediaTime = Math.max(...clips.map((clip) => clip.mediaTime));
  const samples = clips.flatMap((clip) =>
    clip.samples.map((sample) => ({ ...sample, shift: sample.shift + mediaTime - clip.mediaTime })),
  );
  const duration = samples.reduce((sum, { duration }) => sum + duration, 0);
  const movieDuration = Math.round((duration * first.movieTimescale) / first.timescale);
  const stbl = box("stbl", [first.stsd, ...sampleTables(clips, samples, dataStart)]);
  const mdia = box("mdia", [
    withDuration(first.mdhd, duration, 16, 24),
    first.hdlr,
    box("minf", [...first.minfRest, stbl]),
  ]);
  const elst = full("elst", 0, [1, movieDuration, mediaTime, IDENTITY_RATE]);
  return box("moov", [
    withDuration(first.mvhd, movieDuration, 16, 24),
    box("trak", [withDuration(first.tkhd, movieDuration, 20, 28), box("edts", [elst]), mdia]),
  ]);
}

function sampleTables(clips, samples, dataStart) {
  const offsets = [];
  let at = dataStart;
  for (const clip of clips) {
    offsets.push(at);
    at += clip.samples.reduce((sum, { data }) => sum + data.length, 0);
  }
  const sync = samples.flatMap((sample, i) => (sample.sync ? [i + 1] : []));
  const counts = clips.map((clip) => clip.samples.length);
  const stsc = counts.flatMap((count, i) => (i && counts[i - 1] === count ? [] : [[i + 1, count, 1]]));
  return [
    table("stts", runs(samples.map(({ duration }) => duration))),
    table("ctts", runs(samples.map(({ shift }) => shift))),
    table("stss", sync.map((number) => [number])),
    table("stsc", stsc),
    full("stsz", 0, [0, samples.length, ...samples.map(({ data }) => data.length)]),
    table("stco", offsets.map((offset) => [offset])),
  ];
}

function runs(values) {
  const result = [];
  for (const value of values) {
    const last = result.at(-1);
    if (last && last[1] === value) last[0] += 1;
    else result.push([1, value]);
  }
  return result;
}

/** A copy of a header box with another duration; `at` and `atWide`: where it stands in versions 0 and 1. */
function withDuration({ raw, body }, duration, at, atWide) {
  const copy = raw.slice();
  const view = new DataView(copy.buffer);
  const head = raw.length - body.length;
  if (body[0] === 1) view.setBigUint64(head + atWide, BigInt(duration));
  else view.setUint32(head + at, duration);
  return copy;
}

const table = (type, rows) => full(type, 0, [rows.length, ...rows.flat()]);

export function full(type, versionAndFlags, values) {
  const body = new Uint8Array(4 + 4 * values.length);
  const view = new DataView(body.buffer);
  [versionAndFlags, ...values].forEach((value, i) => view.setUint32(4 * i, value));
  return box(type, [body]);
}

export function box(type, parts, extraBytes = 0) {
  const size = 8 + parts.reduce((sum, part) => sum + part.length, 0);
  const result = new Uint8Array(size);
  new DataView(result.buffer).setUint32(0, size + extraBytes);
  for (let i = 0; i < 4; i++) result[4 + i] = type.charCodeAt(i);
  let at = 8;
  for (const part of parts) {
    result.set(part, at);
    at += part.length;
  }
  return result;
}

// ---- boxes --------------------------------------------------------------------------------------------------------

function children(data, start, end) {
  const boxes = [];
  for (let at = start; at + 8 <= end; ) {
    let [size, head] = [u32(data, at), 8];
    if (size === 1) [size, head] = [u32(data, at + 8) * 2 ** 32 + u32(data, at + 12), 16];
    if (size === 0) size = end - at;
    if (size < head || at + size > end) throw new Mp4Error("a box does not fit its parent");
    const type = String.fromCharCode(...data.subarray(at + 4, at + 8));
    boxes.push({ type, raw: data.subarray(at, at + size), body: data.subarray(at + head, at + size) });
    at += size;
  }
  return boxes;
}

const inside = (parent) => (Array.isArray(parent) ? parent : children(parent.body, 0, parent.body.length));
const find = (parent, type) => inside(parent).find((entry) => entry.type === type);

function one(parent, type) {
  const found = find(parent, type);
  if (!found) throw new Mp4Error(`no ${type} box`);
  return found;
}

const equal = (a, b) => a.length === b.length && a.every((value, i) => value === b[i]);
const numbers = (body, at, count) => Array.from({ length: count }, (_, i) => u32(body, at + 4 * i));

function u32(data, at) {
  if (at + 4 > data.length) throw new Mp4Error("the file ends early");
  return data[at] * 0x1000000 + ((data[at + 1] << 16) | (data[at + 2] << 8) | data[at + 3]);
}
