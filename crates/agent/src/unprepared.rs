//! In place of `prepared.rs` where the kernel does not hand system calls to user space: there the supervisor manages no
//! program whose forks it does not learn of by itself, and none is prepared.

use crate::state::Child;
use memfold_sys::channel::Channel;

/// Never called, as the supervisor asks for it only where [`can_dispatch`](crate::dispatch::can_dispatch) says yes.
pub fn prepare(_: &'static Channel) {}

/// The fork is over, in the parent.
pub fn end_in_parent() {}

/// The fork is over, in the child.
pub fn end_in_child() -> Child {
    Child::ToStart { may_call: false }
}
