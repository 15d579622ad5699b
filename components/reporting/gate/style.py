"""Style sheet of the gate's page. Variables are the colours that `style.to_svg` puts into the
plots.
"""

STYLE = """
:root{--paper:#fbfbfa;--card:#fff;--ink:#20242a;--soft:#5b626c;--axis:#aab0b8;--grid:#e3e6ea;
--good:#2e8b57;
--bad:#c0392b;--other:#3f6fb5;--candidate:#0b6e6e;--champion:#7a5195;--plain:#8a8f98;
--untrained:#b98416;
color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--paper:#15181c;--card:#1d2126;--ink:#e8eaed;
--soft:#a2aab4;--axis:#59616b;
--grid:#2f353c;--good:#4cc38a;--bad:#f0786a;--other:#7fa8e8;--candidate:#3dbdb5;--champion:#bb94d9;
--plain:#9aa1ab;
--untrained:#d9a441}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1020px;margin:0 auto;padding:32px 24px 64px}
.kind{margin:0;color:var(--soft);font-size:14px}
h1{font-size:24px;line-height:1.3;margin:6px 0 20px;font-weight:600}
h2{font-size:18px;margin:0 0 12px;font-weight:600}
section{background:var(--card);border:1px solid var(--grid);border-radius:10px;padding:20px 22px;
margin:18px 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.card{background:var(--card);border:1px solid var(--grid);border-radius:10px;padding:12px 16px}
.what,.unit{color:var(--soft);font-size:13px}.number{font-size:20px;font-weight:600;
white-space:nowrap;
font-variant-numeric:tabular-nums}
.badge{display:inline-block;border-radius:7px;padding:2px 12px;margin-right:10px;color:#fff;
background:var(--soft);
text-transform:uppercase;font-size:.75em;letter-spacing:.04em;vertical-align:.08em}
.badge.small{font-size:11px;padding:1px 8px;margin:0;border-radius:5px}
.badge.pass{background:#2e8b57}.badge.fail{background:#c0392b}.badge.inconclusive{background:#a8730b}
.badge.info{background:#6d747e}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{font-weight:600;color:var(--soft);font-size:13px;text-align:left;vertical-align:bottom}
th,td{padding:7px 10px 7px 0;border-bottom:1px solid var(--grid)}
td{vertical-align:top}td:last-child,th:last-child{padding-right:0}
tbody tr:last-child td{border-bottom:0}
.num{text-align:right;white-space:nowrap}td.num{padding-left:10px}
.soft{color:var(--soft);font-weight:400;font-size:.88em}
.note,figcaption{color:var(--soft);font-size:13.5px;margin:10px 0 0}
figure{margin:20px 0 4px}figure svg{display:block;fill:var(--ink);width:100%;height:auto;
max-width:860px;margin:0 auto}
figcaption{text-align:center}
code{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
@media print{section{break-inside:avoid}}
"""
