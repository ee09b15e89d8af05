// SPDX-License-Identifier: Apache-2.0
// The size of the picture: its own shape, as large as the stage allows, so that nothing black is beside it.

const WORTH = 0.95; // a whole-number scale is taken if the picture keeps this part of its largest width

/**
 * Size in CSS pixels of a picture of `width` x `height` on a stage of `maxWidth` x `maxHeight`. A scale that is a whole
 * number of device pixels (`ratio` for a CSS pixel) is preferred where it keeps the part `worth` of the largest width: it
 * treats every pixel alike.
 */
export function fit(width, height, maxWidth, maxHeight, ratio, worth = WORTH) {
  const largest = Math.min(maxWidth / width, maxHeight / height);
  const whole = Math.floor(largest * ratio) / ratio;
  const scale = whole >= worth * largest ? whole : largest;
  return { width: width * scale, height: height * scale };
}

/** Keep `frame` the size of the picture in `view`. The stage's own height follows from `--ratio`, see stage.css. */
export function attachStage(stage, frame, view) {
  const update = () => {
    stage.style.setProperty("--ratio", view.width / view.height);
    const worth = document.fullscreenElement ? 1 : WORTH; // a full screen is to be filled
    const size = fit(view.width, view.height, stage.clientWidth, stage.clientHeight, devicePixelRatio, worth);
    [frame.style.width, frame.style.height] = [`${size.width}px`, `${size.height}px`];
  };
  new ResizeObserver(update).observe(stage);
  new MutationObserver(update).observe(view, { attributes: true, attributeFilter: ["width", "height"] });
}
