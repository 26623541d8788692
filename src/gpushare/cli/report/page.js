for(const button of document.querySelectorAll('th button'))button.addEventListener('click',()=>{
const head=button.parentElement,table=head.closest('table'),body=table.tBodies[0],at=head.cellIndex;
const down=head.getAttribute('aria-sort')!=='descending';
for(const other of table.tHead.rows[0].cells)other.removeAttribute('aria-sort');
head.setAttribute('aria-sort',down?'descending':'ascending');
const value=row=>row.cells[at].dataset.v;
const rows=[...body.rows].sort((a,b)=>{const x=value(a),y=value(b);
if(x===''||y==='')return (x==='')-(y==='');
const order=head.classList.contains('n')?x-y:x.localeCompare(y);return down?-order:order});
body.append(...rows)});
