"""``paceline train`` and ``paceline predict``: the driver of a click model."""
