"""Small .xlsx files, written by hand: no library that the project needs can write one."""

import zipfile
from pathlib import Path

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"


def text(ref: str, value: str) -> str:
    return f'<c r="{ref}" t="inlineStr"><is><t>{value}</t></is></c>'


def row(number: int, *cells: str) -> str:
    return f'<row r="{number}">{"".join(cells)}</row>'


def write_xlsx(path: Path, sheets: dict[str, str]) -> Path:
    """`sheets` maps names to the XML of their rows."""
    ids = {name: f"r{i}" for i, name in enumerate(sheets, start=1)}
    listed = "".join(f'<sheet name="{name}" sheetId="{ids[name][1:]}" r:id="{ids[name]}"/>' for name in sheets)
    links = "".join(
        f'<Relationship Id="{one}" Type="{_OFFICE}/worksheet" Target="worksheets/{one}.xml"/>' for one in ids.values()
    )
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types"><Default Extension="xml" '
        'ContentType="application/xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="r" '
        f'Type="{_OFFICE}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
        "xl/workbook.xml": f'<workbook xmlns="{_MAIN}" xmlns:r="{_OFFICE}"><sheets>{listed}</sheets></workbook>',
        "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{_PACKAGE}/relationships">{links}</Relationships>',
    }
    for name, rows in sheets.items():
        sheet = f'<worksheet xmlns="{_MAIN}"><sheetData>{rows}</sheetData></worksheet>'
        parts[f"xl/worksheets/{ids[name]}.xml"] = sheet
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for part, content in parts.items():
            packed.writestr(part, content)
    return path
