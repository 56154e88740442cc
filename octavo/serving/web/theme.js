// Light, dark, or as the system is. A script of its own, run before the page is drawn, so that nothing flashes.

const THEME = "octavo-theme";
const THEMES = { system: "as the system is", light: "light", dark: "dark" };

function setTheme(theme) {
	if (theme === "system") delete document.documentElement.dataset.theme;
	else document.documentElement.dataset.theme = theme;
	const button = document.getElementById("theme");
	if (!button) return;
	button.dataset.theme = theme;
	button.setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
	button.title = `Colours: ${THEMES[theme]}`;
}

const stored = localStorage.getItem(THEME);
setTheme(stored in THEMES ? stored : "system");
document.addEventListener("DOMContentLoaded", () => {
	const button = document.getElementById("theme");
	const names = Object.keys(THEMES);
	setTheme(document.documentElement.dataset.theme ?? "system");
	button?.addEventListener("click", () => {
		const next = names[(names.indexOf(button.dataset.theme) + 1) % names.length];
		localStorage.setItem(THEME, next);
		setTheme(next);
	});
});
