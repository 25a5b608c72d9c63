"""Schedules as data and pure functions: actions, orders, laws, and the checker that proves the orders."""

from adapipe.schedule.actions import Action, Kind, format_order, parse_cell, parse_order
from adapipe.schedule.buffers import Buffers
from adapipe.schedule.checker import CheckReport, StageReport, check_orders, check_segment, check_synchronous
from adapipe.schedule.grid import format_grid
from adapipe.schedule.orders import SegmentOrder, UpdateOrder, evaluation_order, segment_order, segment_orders
from adapipe.schedule.synchronous import SYNC_SCHEDULES, SyncSchedule, sync_schedule

__all__ = [
    "SYNC_SCHEDULES",
    "Action",
    "Buffers",
    "CheckReport",
    "Kind",
    "SegmentOrder",
    "StageReport",
    "SyncSchedule",
    "UpdateOrder",
    "check_orders",
    "check_segment",
    "check_synchronous",
    "evaluation_order",
    "format_grid",
    "format_order",
    "parse_cell",
    "parse_order",
    "segment_order",
    "segment_orders",
    "sync_schedule",
]
