"""Families of schedules: the catalogue, the user's own, and `build_schedule`, which builds one by name."""

from penstock.schedule.families.catalogue import FAMILIES, CatalogueFamily
from penstock.schedule.families.family import Family
from penstock.schedule.families.lookup import build_schedule, find_family, register_family, require_family
from penstock.schedule.families.own_family import OwnFamily

__all__ = [
    "FAMILIES",
    "CatalogueFamily",
    "Family",
    "OwnFamily",
    "build_schedule",
    "find_family",
    "register_family",
    "require_family",
]
