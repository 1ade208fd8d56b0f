// The names of runs, for pages that know only a run's id.

import { get } from "./api.js";
import { runName, shortId } from "./format.js";

const NEWEST = 200;
const names = new Map();

/** Loads the names once if one of the ids is unknown. Runs older than the newest few hundred are shown by id. */
export async function learnNames(ids, signal) {
  if (ids.every((id) => names.has(id))) return;
  const { training_runs: runs } = await get("api/v1/training_runs", { query: { limit: NEWEST }, signal });
  for (const run of runs) names.set(run.training_run_id, runName(run));
  for (const id of ids) if (!names.has(id)) names.set(id, shortId(id));
}

export function nameOf(id) {
  return names.get(id) ?? shortId(id);
}

/** The run of `tinker://run/kind/name`. */
export function runIn(path) {
  return path.replace("tinker://", "").split("/")[0];
}
