"""Devices: the catalog of GPUs, their parts, and what this machine has."""

from perfguard.devices.catalog import Device, catalog
from perfguard.devices.detect import cpu, cpu_name, detect_gpu, resolve_device, visible_gpu
from perfguard.devices.parts import MigProfile, mig_instance, mig_profile, mig_profiles, mps_share, smallest_profile

__all__ = [
    "Device",
    "MigProfile",
    "catalog",
    "cpu",
    "cpu_name",
    "detect_gpu",
    "mig_instance",
    "mig_profile",
    "mig_profiles",
    "mps_share",
    "resolve_device",
    "smallest_profile",
    "visible_gpu",
]
