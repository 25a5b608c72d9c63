"""Schedules as data and pure functions: actions, orders, laws, and the checker that proves the orders."""

from adapipe.schedule.actions import Action, Kind, format_order, parse_cell, parse_order
from adapipe.schedule.checker import CheckReport, StageReport, check_orders, check_segment
from adapipe.schedule.grid import format_grid
from adapipe.schedule.orders import SegmentOrder, evaluation_order, segment_order, segment_orders

__all__ = [
    "Action",
    "CheckReport",
    "Kind",
    "SegmentOrder",
    "StageReport",
    "check_orders",
    "check_segment",
    "evaluation_order",
    "format_grid",
    "format_order",
    "parse_cell",
    "parse_order",
    "segment_order",
    "segment_orders",
]
