// SPDX-License-Identifier: Apache-2.0
// msgpack, as far as the world camera door speaks it: nil, booleans, numbers, text, bytes, lists, maps with text keys.
// Maps become objects without a prototype, bytes become views into the message. Extension types are refused.

const MAX_DEPTH = 32;

export class MsgpackError extends Error {}

/** Encode a value. Whole numbers become integers, other numbers float64; Uint8Array and ArrayBuffer become bytes. */
export function encode(value) {
  const writer = new Writer();
  writer.put(value, 0);
  return writer.bytes();
}

/** Decode one message that fills all of `data` (Uint8Array or ArrayBuffer). Throws MsgpackError. */
export function decode(data) {
  const reader = new Reader(data instanceof Uint8Array ? data : new Uint8Array(data));
  const value = reader.take(0);
  if (reader.position !== reader.data.length) throw new MsgpackError("bytes follow the message");
  return value;
}

class Writer {
  #buffer = new Uint8Array(1024);
  #view = new DataView(this.#buffer.buffer);
  #length = 0;

  bytes() {
    return this.#buffer.slice(0, this.#length);
  }

  put(value, depth) {
    if (depth > MAX_DEPTH) throw new MsgpackError("nested too deeply");
    if (value === null || value === undefined) this.#u8(0xc0);
    else if (typeof value === "boolean") this.#u8(value ? 0xc3 : 0xc2);
    else if (typeof value === "number") this.#number(value);
    else if (typeof value === "string") this.#text(value);
    else if (value instanceof Uint8Array) this.#bin(value);
    else if (value instanceof ArrayBuffer) this.#bin(new Uint8Array(value));
    else if (Array.isArray(value)) {
      this.#head(value.length, 0x90, 15, [0, 0xdc, 0xdd]);
      for (const item of value) this.put(item, depth + 1);
    } else if (typeof value === "object") {
      const entries = Object.entries(value).filter(([, item]) => item !== undefined);
      this.#head(entries.length, 0x80, 15, [0, 0xde, 0xdf]);
      for (const [key, item] of entries) {
        this.#text(key);
        this.put(item, depth + 1);
      }
    } else throw new MsgpackError(`cannot encode a ${typeof value}`);
  }

  #number(value) {
    if (!Number.isSafeInteger(value) || Object.is(value, -0)) {
      this.#u8(0xcb);
      this.#room(8);
      this.#view.setFloat64(this.#advance(8), value);
    } else if (value >= 0) {
      if (value < 0x80) this.#u8(value);
      else if (value < 0x100) this.#sized(0xcc, 1, value);
      else if (value < 0x10000) this.#sized(0xcd, 2, value);
      else if (value < 0x100000000) this.#sized(0xce, 4, value);
      else this.#wide(0xcf, value);
    } else if (value >= -0x20) this.#u8(value & 0xff);
    else if (value >= -0x80) this.#sized(0xd0, 1, value);
    else if (value >= -0x8000) this.#sized(0xd1, 2, value);
    else if (value >= -0x80000000) this.#sized(0xd2, 4, value);
    else this.#wide(0xd3, value);
  }

  #text(text) {
    const data = new TextEncoder().encode(text);
    this.#head(data.length, 0xa0, 31, [0xd9, 0xda, 0xdb]);
    this.#raw(data);
  }

  #bin(data) {
    this.#head(data.length, 0, -1, [0xc4, 0xc5, 0xc6]);
    this.#raw(data);
  }

  #head(length, short, shortMax, [code8, code16, code32]) {
    if (length <= shortMax) this.#u8(short | length);
    else if (code8 && length < 0x100) this.#sized(code8, 1, length);
    else if (length < 0x10000) this.#sized(code16, 2, length);
    else this.#sized(code32, 4, length);
  }

  #raw(data) {
    this.#room(data.length);
    this.#buffer.set(data, this.#advance(data.length));
  }

  #u8(value) {
    this.#room(1);
    this.#buffer[this.#advance(1)] = value;
  }

  #sized(code, width, value) {
    this.#u8(code);
    this.#room(width);
    const at = this.#advance(width);
    for (let i = 0; i < width; i++) this.#buffer[at + i] = (value >> (8 * (width - 1 - i))) & 0xff;
  }

  #wide(code, value) {
    this.#u8(code);
    this.#room(8);
    this.#view.setBigInt64(this.#advance(8), BigInt(value));
  }

  #advance(count) {
    const at = this.#length;
    this.#length += count;
    return at;
  }

  #room(count) {
    if (this.#length + count <= this.#buffer.length) return;
    const larger = new Uint8Array(Math.max(this.#buffer.length * 2, this.#length + count));
    larger.set(this.#buffer);
    this.#buffer = larger;
    this.#view = new DataView(larger.buffer);
  }
}

class Reader {
  position = 0;

  constructor(data) {
    this.data = data;
    this.view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  }

  take(depth) {
    if (depth > MAX_DEPTH) throw new MsgpackError("nested too deeply");
    const code = this.#uint(1);
    if (code < 0x80) return code;
    if (code < 0x90) return this.#map(code & 15, depth);
    if (code < 0xa0) return this.#list(code & 15, depth);
    if (code < 0xc0) return this.#text(code & 31);
    if (code >= 0xe0) return code - 0x100;
    switch (code) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.#bin(this.#uint(1));
      case 0xc5: return this.#bin(this.#uint(2));
      case 0xc6: return this.#bin(this.#uint(4));
      case 0xca: return this.view.getFloat32(this.#skip(4));
      case 0xcb: return this.view.getFloat64(this.#skip(8));
      case 0xcc: return this.#uint(1);
      case 0xcd: return this.#uint(2);
      case 0xce: return this.#uint(4);
      case 0xcf: return Number(this.view.getBigUint64(this.#skip(8)));
      case 0xd0: return this.view.getInt8(this.#skip(1));
      case 0xd1: return this.view.getInt16(this.#skip(2));
      case 0xd2: return this.view.getInt32(this.#skip(4));
      case 0xd3: return Number(this.view.getBigInt64(this.#skip(8)));
      case 0xd9: return this.#text(this.#uint(1));
      case 0xda: return this.#text(this.#uint(2));
      case 0xdb: return this.#text(this.#uint(4));
      case 0xdc: return this.#list(this.#uint(2), depth);
      case 0xdd: return this.#list(this.#uint(4), depth);
      case 0xde: return this.#map(this.#uint(2), depth);
      case 0xdf: return this.#map(this.#uint(4), depth);
      default: throw new MsgpackError(`type 0x${code.toString(16)} is not used here`);
    }
  }

  #list(length, depth) {
    if (length > this.data.length - this.position) throw new MsgpackError("the message ends early");
    return Array.from({ length }, () => this.take(depth + 1));
  }

  #map(length, depth) {
    if (2 * length > this.data.length - this.position) throw new MsgpackError("the message ends early");
    const map = Object.create(null);
    for (let i = 0; i < length; i++) {
      const key = this.take(depth + 1);
      if (typeof key !== "string") throw new MsgpackError("map keys must be text");
      map[key] = this.take(depth + 1);
    }
    return map;
  }

  #text(length) {
    try {
      return new TextDecoder("utf-8", { fatal: true }).decode(this.#bin(length));
    } catch (error) {
      throw error instanceof MsgpackError ? error : new MsgpackError("text is not UTF-8");
    }
  }

  #bin(length) {
    const at = this.#skip(length);
    return this.data.subarray(at, at + length);
  }

  #uint(width) {
    const at = this.#skip(width);
    if (width === 1) return this.data[at];
    return width === 2 ? this.view.getUint16(at) : this.view.getUint32(at);
  }

  #skip(count) {
    if (count > this.data.length - this.position) throw new MsgpackError("the message ends early");
    this.position += count;
    return this.position - count;
  }
}
