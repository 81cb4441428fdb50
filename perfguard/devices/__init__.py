"""Devices: the catalog of GPUs, and what this machine has."""

from perfguard.devices._catalog import catalog
from perfguard.devices._cpu import cpu, cpu_name
from perfguard.devices._detect import detect_gpu, resolve_device, visible_gpu
from perfguard.devices._mig import MigProfile, mig_profile, mig_profiles, smallest_profile
from perfguard.devices._partition import mig_instance, mps_share
from perfguard.devices._prices import Price, price_of, read_prices
from perfguard.devices._spec import Device

__all__ = [
    "Device",
    "MigProfile",
    "Price",
    "catalog",
    "cpu",
    "cpu_name",
    "detect_gpu",
    "mig_instance",
    "mig_profile",
    "mig_profiles",
    "mps_share",
    "price_of",
    "read_prices",
    "resolve_device",
    "smallest_profile",
    "visible_gpu",
]
