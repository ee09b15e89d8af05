// SPDX-License-Identifier: Apache-2.0
// A camera that walks: one reading of the controls as the actions of a chunk, and the world poses that come back as places
// of its video frames. The server alone moves the camera. Knows no devices and no server.

// Per latent frame of a look key at speed 1, in degrees; a movement key is one step.
export const YAW_DEGREES = 6;
export const PITCH_DEGREES = 4;

const RATES = ["forward", "right", "up", "yaw", "pitch"];
const MOTIONS = { turn: "turnYaw", look: "turnPitch" }; // axis -> what the mouse has turned, in degrees

/** Whether the server takes the axes of a camera that walks. */
export const walks = ({ axes }) => RATES.every((name) => axes.some((axis) => axis.name === name));

/**
 * Actions of `count` latent frames. held, taps: axes in [-1, 1]; a tap counts for one latent frame, however short it was.
 * turnYaw, turnPitch: degrees, spread over the frames. Walking diagonally is no faster. space: the server's, whose ranges
 * hold.
 */
export function walkingFrames({ held, taps, ...turned }, count, { speed, turnSpeed, space }) {
  const scale = { forward: speed, right: speed, up: speed, yaw: YAW_DEGREES * turnSpeed, pitch: PITCH_DEGREES * turnSpeed };
  return Array.from({ length: count }, (_, frame) => {
    const share = (name) => clamp(held[name] + (frame === 0 ? taps[name] : 0), -1, 1);
    const length = Math.max(1, Math.hypot(share("forward"), share("right"), share("up")));
    const axes = {};
    for (const { name, low, high } of space.axes) {
      let value = 0;
      if (name in scale) value = (share(name) * scale[name]) / (name === "yaw" || name === "pitch" ? 1 : length);
      else if (name in MOTIONS) value = turned[MOTIONS[name]] / count;
      if (value !== 0) axes[name] = clamp(value, low, high);
    }
    return Object.keys(axes).length > 0 ? { axes } : [];
  });
}

/** Whether anything moves in these frames. */
export const moves = (frames) => frames.some((frame) => !Array.isArray(frame));

/** How many steps over the ground these frames ask for. */
export const stepsOf = (frames) =>
  frames.reduce((sum, frame) => sum + (Array.isArray(frame) ? 0 : Math.hypot(frame.axes.forward ?? 0, frame.axes.right ?? 0)), 0);

/** A row of `world_poses`: metres to the east and north, radians from north to east and upwards. */
export const placeOf = ([x, z, heading, pitch]) => ({ x, z, yaw: radians(heading), pitch: radians(pitch) });

/** The start pose of a session that starts at `place`. */
export const startPoseOf = ({ x, z, yaw, pitch }) => ({
  x_m: x,
  z_m: z,
  heading_degrees: ((degrees(yaw) % 360) + 360) % 360,
  pitch_degrees: degrees(pitch),
});

/**
 * Places of the `count` video frames of a chunk. worldPoses: of its latent frames, each that of its last video frame.
 * before: the place where the last chunk ended; null in a session's first chunk, whose first video frame is its first
 * latent frame.
 */
export function placesOf(worldPoses, count, before) {
  const rows = worldPoses.map(placeOf);
  const knots = before === null ? rows : [before, ...rows];
  const last = knots.length - 1;
  return Array.from({ length: count }, (_, frame) => {
    if (last === 0) return knots[0];
    const at = before === null ? (frame * last) / Math.max(1, count - 1) : ((frame + 1) * last) / count;
    const index = Math.min(Math.floor(at), last - 1);
    return between(knots[index], knots[index + 1], at - index);
  });
}

function between(one, other, part) {
  const turn = ((((other.yaw - one.yaw) % TURN) + 1.5 * TURN) % TURN) - TURN / 2; // the shorter way round
  return {
    x: one.x + part * (other.x - one.x),
    z: one.z + part * (other.z - one.z),
    yaw: one.yaw + part * turn,
    pitch: one.pitch + part * (other.pitch - one.pitch),
  };
}

const TURN = 2 * Math.PI;
const radians = (value) => (value * Math.PI) / 180;
const degrees = (value) => (value * 180) / Math.PI;
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
