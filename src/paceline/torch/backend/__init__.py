"""The process group of ``torch.distributed`` on collective operations of Paceline."""
