// SPDX-License-Identifier: Apache-2.0
// Where the visitor stands and looks, and how held controls move that. Poses are camera to world, OpenCV axes: x right,
// y down, z forward. Knows no devices and no server.

export const MAX_PITCH = (85 * Math.PI) / 180;

// Per latent frame, as the keys of the reference demos: 0.05 units, 6 degrees right or left, 4 up or down.
export const STEP = 0.05;
export const YAW_STEP = (6 * Math.PI) / 180;
export const PITCH_STEP = (4 * Math.PI) / 180;

export const START = Object.freeze({ x: 0, y: 0, z: 0, yaw: 0, pitch: 0 });

/** The 4x4 pose of a place. yaw: radians to the right; pitch: radians upwards. */
export function poseOf({ x, y, z, yaw, pitch }) {
  const [cy, sy, cp, sp] = [Math.cos(yaw), Math.sin(yaw), Math.cos(pitch), Math.sin(pitch)];
  return [
    [cy, sy * sp, sy * cp, x],
    [0, cp, -sp, y],
    [-sy, cy * sp, cy * cp, z],
    [0, 0, 0, 1],
  ];
}

/**
 * Places of the next `count` frames under one reading of the controls, the last one being where the walk goes on.
 * motion: forward, right, up, yaw, pitch in [-1, 1], held all the time; turnYaw, turnPitch: radians, spread over the
 * frames. taps: parts of `motion` that were only touched: they count for `framesPerStep` frames.
 */
export function walk(from, count, { held, taps, turnYaw, turnPitch }, { framesPerStep, speed, turnSpeed }, first) {
  const places = [];
  let place = { ...from };
  for (let frame = 0; frame < count; frame++) {
    // The session's very first frame is the start image itself, seen from the start.
    if (!(first && frame === 0)) {
      const tapped = frame < framesPerStep;
      const axis = (name) => clamp(held[name] + (tapped ? taps[name] : 0), -1, 1);
      const length = Math.max(1, Math.hypot(axis("forward"), axis("right"), axis("up")));
      const stride = (STEP * speed) / framesPerStep / length;
      const [sin, cos] = [Math.sin(place.yaw), Math.cos(place.yaw)];
      place = {
        x: place.x + stride * (axis("forward") * sin + axis("right") * cos),
        y: place.y - stride * axis("up"),
        z: place.z + stride * (axis("forward") * cos - axis("right") * sin),
        yaw: place.yaw + (axis("yaw") * YAW_STEP * turnSpeed) / framesPerStep + turnYaw / count,
        pitch: clamp(
          place.pitch + (axis("pitch") * PITCH_STEP * turnSpeed) / framesPerStep + turnPitch / count,
          -MAX_PITCH,
          MAX_PITCH,
        ),
      };
    }
    places.push(place);
  }
  return places;
}

/**
 * Focal lengths and centre of the view that goes with keys, for pictures of the model's reference size.
 * keyFocal: in pixels of the video; size: the video's.
 */
export function intrinsicsFor([wide, high], keyFocal, size) {
  return [(keyFocal * wide) / size.width, (keyFocal * high) / size.height, wide / 2, high / 2];
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
