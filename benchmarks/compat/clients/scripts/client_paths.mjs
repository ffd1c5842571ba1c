// Runs the paths that a client has, and says of each whether it went.

export const SERVER = process.env.COMPAT_SERVER; // the server's address, without a path
export const BASE_URL = `${SERVER}/v1`;
export const MODEL = process.env.COMPAT_MODEL;
export const ADAPTER = process.env.COMPAT_ADAPTER;
export const KEY = "no-key-needed";
export const QUESTION = "Name the capital of France.";
export const WEATHER = {
  type: "object",
  properties: {
    city: { type: "string", maxLength: 12 },
    unit: { type: "string", enum: ["celsius", "fahrenheit"] },
  },
  required: ["city", "unit"],
  additionalProperties: false,
};

export function check(holds, value) {
  if (!holds) throw new Error(`got ${JSON.stringify(value)}`);
}

export function checkWeather(given) {
  const read = typeof given === "string" ? JSON.parse(given) : given;
  check(Object.keys(read).sort().join() === "city,unit", read);
  check(["celsius", "fahrenheit"].includes(read.unit), read);
}

export async function run(paths) {
  for (const [path, go] of Object.entries(paths)) {
    let reason = "";
    try {
      await go();
    } catch (error) {
      reason = `${error.constructor.name}: ${error.message}`;
    }
    console.log(`\n@path ${JSON.stringify({ path, reason })}`);
  }
}
