// SPDX-License-Identifier: Apache-2.0
// The numbers below the picture: what was measured, and how it reads.

const KEPT = 60;
const MISSING = "–";

export class Stats {
  chunkMs = new Recent();
  inputToPhotonMs = new Recent();
  photonParts = { waiting: new Recent(), making: new Recent(), buffer: new Recent() };
  server = {}; // the last chunk's own timing, milliseconds
  bytesPerS = 0;
  #arrivals = [];

  /** An input was made, carried by a request, its chunk came, its first picture is shown (all as `performance.now()`). */
  photon(inputAt, sentAt, cameAt, shownAt) {
    this.inputToPhotonMs.add(shownAt - inputAt);
    this.photonParts.waiting.add(sentAt - inputAt);
    this.photonParts.making.add(cameAt - sentAt);
    this.photonParts.buffer.add(shownAt - cameAt);
  }

  /** A chunk came: `wallMs` from request to arrival (null = not measured), `bytes` of pictures. */
  chunk(wallMs, bytes, timing) {
    if (wallMs !== null) this.chunkMs.add(wallMs);
    this.server = timing ?? {};
    const now = performance.now();
    this.#arrivals.push([now, bytes]);
    this.#arrivals = this.#arrivals.filter(([time]) => now - time < 5000);
    const spanS = Math.max(1, (now - this.#arrivals[0][0]) / 1000);
    this.bytesPerS = this.#arrivals.reduce((sum, [, count]) => sum + count, 0) / spanS;
  }
}

/** Quantiles of the last values. */
export class Recent {
  #values = [];

  add(value) {
    this.#values.push(value);
    if (this.#values.length > KEPT) this.#values.shift();
  }

  get last() {
    return this.#values.at(-1) ?? null;
  }

  quantile(q) {
    if (this.#values.length === 0) return null;
    const sorted = this.#values.toSorted((a, b) => a - b);
    return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
  }
}

/** Writes the measurements' fields: elements with `data-stat`. */
export function showStats(root, stats, { player, pacer, link, numPending, codec }) {
  const { server } = stats;
  const values = {
    fps: `${player.shownFps}`,
    rate: player.rate < 0.995 ? `of ${player.fps} (server ${Math.round(player.rate * 100)} %)` : `of ${player.fps}`,
    chunk: ms(stats.chunkMs.last),
    stages: ["encode", "denoise", "decode", "mux"]
      .filter((name) => server[`${name}_ms`] >= 0.5)
      .map((name) => `${name} ${Math.round(server[`${name}_ms`])}`)
      .join(" · "),
    photon: ms(stats.inputToPhotonMs.quantile(0.5)),
    photon95: `95 %: ${ms(stats.inputToPhotonMs.quantile(0.95))}`,
    waiting: ms(stats.photonParts.waiting.quantile(0.5)),
    making: ms(stats.photonParts.making.quantile(0.5)),
    buffered: ms(stats.photonParts.buffer.quantile(0.5)),
    buffer: ms(player.bufferedMs),
    needed: `next chunk at ${ms(pacer.neededMs)}`,
    queue: `${numPending} asked · server queue ${ms(server.queue_ms ?? null)}`,
    net: `${(stats.bytesPerS / 1000).toFixed(0)} kB/s`,
    codec,
    rtt: `round trip ${ms(link.rttMs)}`,
    stalls: player.numStalls > 0 ? `· ran out ${player.numStalls} ×` : "",
  };
  for (const element of root.querySelectorAll("[data-stat]")) {
    const value = values[element.dataset.stat];
    if (element.textContent !== value) element.textContent = value;
  }
}

const ms = (value) => (value === null || value === undefined ? MISSING : `${Math.round(value)} ms`);
