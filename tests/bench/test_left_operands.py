"""Left operands that a loop loses are found in disassembled code."""

import pytest

from bench.machine_code.left_operands import lost_operands

# A loop's two products of scores (16 columns each) and its product with the values.
LOOP = """\
        /*0000*/                   LDS.128 R88, [R4] ;
        /*0010*/                   LDS.128 R92, [R4+0x10] ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR18], R16 ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R88, gdesc[UR16], RZ, !UPT ;
        /*0040*/                   HGMMA.64x16x16.F32.BF16 R24, R92, gdesc[UR16], R24, gsb0 ;
        /*0050*/              @!P3 FMNMX.NAN R40, R24, R25, !PT ;
        {change}
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R56, R100, gdesc[UR16].tnspB, R56 ;
        /*0080*/               @P0 BRA `(.L_x_1) ;
        /*0090*/                   F2FP.BF16.F32.PACK_AB R88, R19, R20 ;
"""


@pytest.mark.parametrize(
    "change",
    [
        "/*0060*/  F2FP.BF16.F32.PACK_AB R100, R19, R88 ;",
        "/*0060*/  LOP3.LUT R93, R93, R7, RZ, 0x3c, !PT ;",  # changes its own value
        "/*0060*/  SHFL.BFLY PT, R23, R88, 0x1, 0x1f ;",
        "/*0060*/  STS.128 [R88], R60 ;",
        "/*0060*/  ISETP.NE.AND P1, PT, R88, RZ, PT ;",
    ],
)
def test_what_leaves_the_queries_alone(change):
    assert lost_operands(LOOP.replace("{change}", change)) == []


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ("/*0060*/  F2FP.BF16.F32.PACK_AB R91, R19, R20 ;", ["R88: F2FP.BF16.F32.PACK_AB"]),
        ("/*0060*/  SHFL.BFLY PT, R92, R23, 0x1, 0x1f ;", ["R92: SHFL.BFLY"]),
        ("/*0060*/  IMAD.WIDE R90, R3, R4, R6 ;", ["R88: IMAD.WIDE"] * 2),
        ("/*0060*/  LDS.128 R84, [R4] ;", []),
        ("/*0060*/  LDS.128 R86, [R4] ;", ["R88: LDS.128"] * 2),
        ("/*0060*/  HGMMA.64x8x16.F32.BF16 R86, R60, gdesc[UR4], R86 ;", ["R88: HGMMA"] * 2),
    ],
)
def test_what_loses_them(change, written):
    found = lost_operands(LOOP.replace("{change}", change))
    assert len(found) == len(written)
    for line, part in zip(found, written, strict=True):
        assert part in line
