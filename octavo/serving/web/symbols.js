// LaTeX's names of letters and signs.

const pairs = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split("=")));

/** Letters: set like variables. */
export const LETTERS = pairs(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ
	mu=μ nu=ν xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ
	Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω infty=∞ partial=∂ nabla=∇ hbar=ℏ ell=ℓ Re=ℜ Im=ℑ aleph=ℵ emptyset=∅
	varnothing=∅ imath=ı angle=∠ top=⊤ bot=⊥ degree=° prime=′ dagger=†`);

/** Signs: set with space around them as their kind has it. */
export const SIGNS = pairs(`pm=± mp=∓ times=× div=÷ cdot=⋅ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ otimes=⊗ cap=∩ cup=∪
	vee=∨ lor=∨ wedge=∧ land=∧ setminus=∖ le=≤ leq=≤ ge=≥ geq=≥ ne=≠ neq=≠ equiv=≡ sim=∼ simeq=≃ approx=≈ cong=≅ propto=∝ ll=≪ gg=≫
	prec=≺ succ=≻ preceq=⪯ succeq=⪰ subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇ in=∈ notin=∉ ni=∋ mid=∣ parallel=∥ perp=⊥
	vdash=⊢ forall=∀ exists=∃ nexists=∄ neg=¬ lnot=¬ to=→ rightarrow=→ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐
	Leftrightarrow=⇔ iff=⟺ implies=⟹ impliedby=⟸ longrightarrow=⟶ mapsto=↦
	uparrow=↑ downarrow=↓ rightleftharpoons=⇌ ldots=… dots=… cdots=⋯ vdots=⋮ ddots=⋱
	colon=: therefore=∴ because=∵ langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lvert=| rvert=| vert=| Vert=‖ lVert=‖ rVert=‖
	lbrace={ rbrace=} backslash=\\ triangleq=≜ leqslant=⩽ geqslant=⩾ coloneqq=≔`);

/** Signs that may have their limits above and below. */
export const LARGE = pairs(`sum=∑ prod=∏ coprod=∐ int=∫ iint=∬ iiint=∭ oint=∮ bigcup=⋃ bigcap=⋂ bigvee=⋁ bigwedge=⋀ bigoplus=⨁ bigotimes=⨂`);

/** Names of functions; those after the bar take limits below. */
export const FUNCTIONS = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth exp log ln lg deg dim hom ker arg".split(" "));
export const LIMITS = new Set("lim liminf limsup max min sup inf det gcd Pr argmax argmin".split(" "));

/** Accents: the sign above, or below. */
export const ACCENTS = pairs(`hat=^ widehat=^ bar=¯ overline=¯ vec=→ overrightarrow=→ overleftarrow=← dot=˙ ddot=¨ tilde=~ widetilde=~ check=ˇ
	overbrace=⏞`);
export const UNDERS = pairs("underline=_ underbrace=⏟");

/** Widths of spaces. */
export const SPACES = { ",": "0.17em", ":": "0.22em", ">": "0.22em", ";": "0.28em", "!": "-0.17em", " ": "0.25em", quad: "1em", qquad: "2em", enspace: "0.5em", thinspace: "0.17em" };

/** Where the alphabets of mathematics begin in Unicode: capitals, small letters, digits; and those set elsewhere. */
export const ALPHABETS = {
	mathbf: [0x1d400, 0x1d41a, 0x1d7ce],
	boldsymbol: [0x1d468, 0x1d482, 0x1d7ce],
	bm: [0x1d468, 0x1d482, 0x1d7ce],
	mathbb: [0x1d538, 0x1d552, 0x1d7d8],
	mathcal: [0x1d49c, 0x1d4b6],
	mathscr: [0x1d49c, 0x1d4b6],
	mathfrak: [0x1d504, 0x1d51e],
	mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2],
	mathtt: [0x1d670, 0x1d68a, 0x1d7f6],
};
export const ELSEWHERE = {
	mathbb: pairs("C=ℂ H=ℍ N=ℕ P=ℙ Q=ℚ R=ℝ Z=ℤ"),
	mathcal: pairs("B=ℬ E=ℰ F=ℱ H=ℋ I=ℐ L=ℒ M=ℳ R=ℛ e=ℯ g=ℊ o=ℴ"),
	mathscr: pairs("B=ℬ E=ℰ F=ℱ H=ℋ I=ℐ L=ℒ M=ℳ R=ℛ e=ℯ g=ℊ o=ℴ"),
	mathfrak: pairs("C=ℭ H=ℌ I=ℑ R=ℜ Z=ℨ"),
};
