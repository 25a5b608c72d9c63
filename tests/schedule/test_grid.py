from adapipe.schedule.actions import parse_order
from adapipe.schedule.grid import format_grid
from adapipe.schedule.orders import segment_orders


def test_the_marked_cell_stands_out_and_columns_stay_aligned() -> None:
    orders = [parse_order("0F0 0F1 0B0"), parse_order("1F0 1B0 1F1 1B1"), []]
    assert format_grid(orders, (0, 1)).splitlines() == [
        "stage 0  0F0 >0F1< 0B0",
        "stage 1  1F0  1B0  1F1  1B1",
        "stage 2",
    ]


def test_columns_fit_the_longest_cell() -> None:
    orders = [parse_order("0F9 0F10 0B9"), parse_order("1F9 1B9 1F10")]
    assert format_grid(orders, (1, 2)).splitlines() == [
        "stage 0  0F9   0F10  0B9",
        "stage 1  1F9   1B9  >1F10<",
    ]


def test_stage_numbers_are_right_aligned() -> None:
    lines = format_grid(segment_orders(11, 1, 1)).splitlines()
    assert len(lines) == 11
    assert lines[9].startswith("stage  9 ")
    assert lines[10].startswith("stage 10 ")
    assert len({line.index("F0") for line in lines[:10]}) == 1


def test_long_orders_are_cut_to_a_window_around_the_mark() -> None:
    orders = [*segment_orders(1, 2, 4), parse_order("1F0 1F1 1F2"), []]
    assert format_grid(orders, (0, 7), reach=2).splitlines() == [
        "stage 0 ...  0F2  0B2 >0F3< 0B3  0U1  ...",
        "stage 1 ...",
        "stage 2",
    ]
    assert format_grid(orders, (0, 1), reach=2).splitlines()[0] == "stage 0  0F0 >0B0< 0F1  0B1  ..."
    assert format_grid(orders, (0, 19), reach=2).splitlines()[0] == "stage 0 ...  0F7  0B7 >0U3<"


def test_the_default_window_is_twelve_cells_each_side() -> None:
    line = format_grid(segment_orders(1, 50, 1), (0, 50))
    assert len(line.replace("...", "").split()) == len(["stage", "0"]) + 12 + 1 + 12
    assert ">0F25<" in line


def test_without_a_mark_everything_is_shown() -> None:
    grid = format_grid(segment_orders(2, 20, 2))
    assert ">" not in grid
    assert "..." not in grid
    assert [line.split()[2:] for line in grid.splitlines()] == [
        [str(action) for action in order] for order in segment_orders(2, 20, 2)
    ]


def test_no_orders() -> None:
    assert format_grid([]) == ""
