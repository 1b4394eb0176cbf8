"""``paceline horovodrun``: Horovod's launcher, translated to ``paceline run``."""
