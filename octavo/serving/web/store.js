// Conversations kept in this browser, in IndexedDB. Where that is not allowed they last as long as the page.

const HEADS = "heads";
const CHATS = "chats";
const others = new BroadcastChannel("octavo-chats");
const memory = { [HEADS]: new Map(), [CHATS]: new Map() };
const opened = open();

/** Whether conversations outlive the page. */
export const isLasting = opened.then(Boolean);

/** Call `act` with the id of a conversation that another tab has changed. */
export const onForeignChange = (act) => others.addEventListener("message", ({ data }) => act(data));

/** { id, title, changed } of every conversation, newest first. */
export async function heads() {
	const found = await read(HEADS, (store) => store.getAll(), () => [...memory[HEADS].values()]);
	return found.sort((a, b) => b.changed - a.changed);
}

/** One conversation; undefined when there is none of this id. */
export const get = (id) => read(CHATS, (store) => store.get(id), () => structuredClone(memory[CHATS].get(id)));

/** Keep conversations, or their newer states. Throws when the browser has no room. */
export async function put(...chats) {
	await change((store, name) => {
		for (const chat of chats) store.put(name === HEADS ? headOf(chat) : structuredClone(chat), chat.id);
	});
	for (const { id } of chats) others.postMessage(id);
}

export async function remove(id) {
	await change((store) => store.delete(id));
	others.postMessage(id);
}

/** Ids of the conversations in which `text` occurs. */
export async function search(text) {
	const wanted = text.toLowerCase();
	const chats = await read(CHATS, (store) => store.getAll(), () => [...memory[CHATS].values()]);
	return new Set(chats.filter((chat) => holds(chat, wanted)).map(({ id }) => id));
}

const headOf = ({ id, title, changed }) => ({ id, title, changed });
const holds = ({ title, turns }, wanted) =>
	[title, ...turns.map((turn) => turn.text)].some((text) => text.toLowerCase().includes(wanted));

function open() {
	return new Promise((resolve) => {
		try {
			const asked = indexedDB.open("octavo", 1);
			asked.onupgradeneeded = () => [HEADS, CHATS].forEach((name) => asked.result.createObjectStore(name));
			asked.onsuccess = () => resolve(asked.result);
			asked.onerror = () => resolve(null);
		} catch {
			resolve(null); // a browser told to keep nothing
		}
	});
}

async function read(name, ask, orElse) {
	const database = await opened;
	return database ? settled(ask(database.transaction(name).objectStore(name))) : orElse();
}

async function change(act) {
	const database = await opened;
	const transaction = database?.transaction([HEADS, CHATS], "readwrite");
	const kept = (map) => ({ put: (value, id) => map.set(id, value), delete: (id) => map.delete(id) });
	for (const name of [HEADS, CHATS]) act(transaction?.objectStore(name) ?? kept(memory[name]), name);
	if (transaction) await new Promise((resolve, reject) => {
		transaction.oncomplete = resolve;
		transaction.onabort = () => reject(transaction.error);
	});
}

function settled(request) {
	return new Promise((resolve, reject) => {
		request.onsuccess = () => resolve(request.result);
		request.onerror = () => reject(request.error);
	});
}
