// When a conversation has become too long for the model.

/** What the server says of it. */
const FULL = /context length/i;

/** Whether an answer failed or ended because the context is full. */
export const isFull = ({ fault, finish, facts }, { max_model_len }) =>
	fault ? FULL.test(fault) : finish === "length" && facts?.used >= max_model_len;

/** Whether there is a turn that could be left out. */
export const canMakeRoom = (path) => Boolean(oldestOf(path));

/** Leave the oldest turn before the last one out of what the model is told; false when there is none. */
export function leaveOutOldest(path) {
	const oldest = oldestOf(path);
	if (oldest) oldest.isOut = true;
	return Boolean(oldest);
}

const oldestOf = (path) => path.slice(0, -2).find((turn) => turn.role === "user" && !turn.isOut);
