"""The page's style sheet: one set of colours for light and one for dark, each with a contrast of 4.5 or more."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1b1f24; --soft: #565d66; --line: #d3d8de; --band: #f3f5f7; --link: #0a5cad;
  --inside: #0b6b3a; --inside-band: #e2f4e9; --outside: #9a3412; --outside-band: #fdece4;
  --absent: #4b525b; --absent-band: #eceff2; --paper: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --ink: #e6e9ed; --soft: #a8b0ba; --line: #3a414a; --band: #1e2329; --link: #7cb8f5;
    --inside: #7fd6a2; --inside-band: #173325; --outside: #f3aa86; --outside-band: #3b2216;
    --absent: #b6bec8; --absent-band: #2a3037; --paper: #ffffff;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 1.5rem clamp(1rem, 3vw, 2.5rem) 4rem; max-width: 84rem; background: var(--page);
  color: var(--ink); font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
}
h1 { font-size: clamp(1.5rem, 4vw, 2rem); line-height: 1.2; margin: 0 0 0.6rem; }
h2 { font-size: 1.4rem; line-height: 1.3; margin: 3rem 0 0.8rem; border-bottom: 2px solid var(--line); }
h3 { font-size: 1.1rem; line-height: 1.35; margin: 2.2rem 0 0.5rem; }
h1, h2, h3, p, figcaption, li, dd { overflow-wrap: anywhere; }
p, ul, figure, details, dl { margin: 0 0 0.9rem; }
p, figcaption, li, dd { max-width: 74ch; }
a { color: var(--link); }
code { font: 0.88em/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; border-radius: 2px; }
.skip { position: absolute; left: -99rem; }
.skip:focus { left: 1rem; top: 0.5rem; padding: 0.3rem 0.6rem; background: var(--page); }
.soft, figcaption, small { color: var(--soft); }
nav ul { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; padding: 0; list-style: none; max-width: none; }
.again { display: block; padding: 0.45rem 0.7rem; background: var(--band); border-radius: 4px; overflow-x: auto;
  white-space: pre; margin: 0 0 0.9rem; }
.scroll { overflow: auto; max-height: 34rem; border: 1px solid var(--line); border-radius: 4px; margin: 0 0 0.9rem; }
table { border-collapse: separate; border-spacing: 0; font-size: 0.86rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 0.3rem 0.55rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { position: sticky; top: 0; z-index: 1; padding: 0; background: var(--band); white-space: nowrap; }
tbody th { font-weight: 400; }
tbody tr:last-child > * { border-bottom: 0; }
td { white-space: nowrap; }
.n { text-align: right; }
.w { white-space: normal; min-width: 16rem; }
.pairs td, .pairs th { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
thead .plain { padding: 0.4rem 0.55rem; }
td small { display: block; max-width: 34rem; }
#claims th { min-width: 12rem; }
#claims thead th, #claims [data-name="section"] { min-width: 0; }
#claims td { min-width: 7rem; white-space: normal; }
#claims [data-name^="here"] { white-space: nowrap; }
#claims [data-name="paper"] { min-width: 8rem; }
#claims [data-name="verdict"] { min-width: 9.5rem; }
#claims [data-name="rule"] { min-width: 0; }
thead button {
  all: unset; display: block; width: 100%; box-sizing: border-box; padding: 0.4rem 0.55rem; font-weight: 600;
  cursor: pointer;
}
thead .n button { text-align: right; }
thead button:hover { color: var(--link); }
thead button:focus-visible { outline: 3px solid var(--link); outline-offset: -3px; }
thead button::after { content: "\\2195"; display: inline-block; width: 1.1em; text-align: right; color: var(--soft); }
[aria-sort="ascending"] button::after { content: "\\2191"; color: var(--ink); }
[aria-sort="descending"] button::after { content: "\\2193"; color: var(--ink); }
.verdict { display: inline-block; padding: 0 0.5em; border-radius: 3px; white-space: nowrap; }
td .verdict { white-space: normal; }
.inside { color: var(--inside); background: var(--inside-band); }
.outside { color: var(--outside); background: var(--outside-band); }
.absent { color: var(--absent); background: var(--absent-band); }
.counts { display: flex; flex-wrap: wrap; gap: 0.5rem; padding: 0; list-style: none; }
.filters { display: flex; flex-wrap: wrap; gap: 0.5rem 1.2rem; align-items: center; margin: 0 0 0.7rem; }
.filters select { font: inherit; max-width: 100%; padding: 0.15rem 0.3rem; color: var(--ink); background: var(--page);
  border: 1px solid var(--soft); border-radius: 4px; }
[hidden] { display: none !important; }
details { border: 1px solid var(--line); border-radius: 4px; padding: 0 0.8rem; }
details[open] { padding-bottom: 0.4rem; }
summary { cursor: pointer; padding: 0.45rem 0; overflow-wrap: anywhere; }
figure { margin: 0 0 0.9rem; }
.zoom { all: unset; display: block; width: fit-content; max-width: 100%; cursor: zoom-in; background: var(--paper);
  border: 1px solid var(--line); border-radius: 4px; padding: 0.4rem; box-sizing: border-box; }
.zoom:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.zoom img { display: block; max-width: 100%; height: auto; }
figcaption { margin-top: 0.4rem; }
dialog { width: 96vw; height: 94vh; max-width: none; max-height: none; padding: 0; border: 1px solid var(--line);
  border-radius: 6px; background: var(--page); color: var(--ink); }
dialog[open] { display: flex; flex-direction: column; }
dialog::backdrop { background: rgb(0 0 0 / 0.65); }
.bar { display: flex; flex-wrap: wrap; gap: 0.4rem 0.8rem; align-items: center; padding: 0.4rem 0.8rem;
  border-bottom: 1px solid var(--line); }
.bar p { flex: 1 1 18rem; max-width: none; margin: 0; font-weight: 600; }
.bar button, .all { font: inherit; padding: 0.2rem 0.8rem; color: var(--ink); background: var(--band); cursor: pointer;
  border: 1px solid var(--soft); border-radius: 4px; }
.all { margin: 0 0 0.9rem; }
.stage { flex: 1; overflow: auto; background: var(--paper); }
.stage img { display: block; margin: auto; max-width: none; width: auto; height: auto; }
.stage.fit img { max-width: 100%; max-height: 100%; }
@media (max-width: 40rem) {
  body { padding-top: 1rem; }
  th, td { padding: 0.3rem 0.5rem; }
  thead button { padding: 0.4rem 0.5rem; }
  .scroll { max-height: 75vh; }
  .again { white-space: pre-wrap; overflow-wrap: anywhere; }
  #claims, #claims thead, #claims tbody, #claims tr, #claims th, #claims td { display: block; text-align: left; }
  #claims thead { position: sticky; top: 0; z-index: 1; }
  #claims thead tr { display: flex; flex-wrap: wrap; background: var(--band); border-bottom: 1px solid var(--line); }
  #claims thead th { position: static; border: 0; }
  #claims tbody tr { display: flex; flex-direction: column; padding: 0.5rem; border-bottom: 1px solid var(--line); }
  #claims tbody th { order: -1; font-weight: 600; }
  #claims tbody [data-name] { padding: 0; border: 0; min-width: 0; }
  #claims tbody td::before { content: attr(data-name) ": "; color: var(--soft); }
}
@media print {
  :root { --page: #fff; --ink: #000; --soft: #333; --line: #999; --band: #f3f5f7; --link: #000; --inside: #000;
    --outside: #000; --absent: #000; --inside-band: #fff; --outside-band: #fff; --absent-band: #fff; }
  nav, .filters, .skip, .all, dialog { display: none; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .scroll { max-height: none; overflow: visible; border: 0; }
  .again { white-space: pre-wrap; overflow-wrap: anywhere; }
  table { font-size: 7.5pt; }
  thead { display: table-row-group; }
  thead th { position: static; white-space: normal; }
  thead button::after { content: none; }
  #claims tbody [data-name] { min-width: 0; }
  th, td { padding: 0.15rem 0.3rem; white-space: normal; overflow-wrap: break-word; }
  figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .zoom { border: 0; padding: 0; }
}
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
"""
