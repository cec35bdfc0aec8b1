//! Helpers that are to exit before their program does, and programs that have ended.

use crate::supervised::space::AddressSpace;
use memfold_sys::process::Credentials;

impl AddressSpace {
    /// Makes the helper exit if it is the only thread left of a program whose threads exited one by one
    /// (`exit`, not `exit_group`). The last thread's status becomes that of the process, so the helper
    /// exits with the main thread's status, the only one that is known.
    pub(crate) fn end_helper_after_threads(&self) {
        if !self.is_detached()
            && let Some(attached) = self.attached()
            && let Some(status) = attached.inspector.left_to_one()
        {
            self.channel.dismiss_helper(status);
        }
    }

    /// Makes a privileged helper exit once its program gave up privileges: an attacker in the program
    /// could use the helper's.
    pub(crate) fn follow_privileges(&self) {
        let Some(attached) = self.attached().filter(|_| !self.is_detached()) else {
            return;
        };
        let privileges = || {
            let of_helper = attached.inspector.credentials().ok();
            of_helper.filter(Credentials::are_privileged)
        };
        let Some(of_helper) = attached.to_follow.get_or_init(privileges) else {
            return;
        };
        let process = attached.inspector.process();
        let of_program = process.credentials(process.pid());
        if of_program.is_ok_and(|now| of_helper.exceed(&now)) {
            log::info!(
                "process {} gave up privileges: its helper exits, and no more of its pages are paged out",
                process.pid()
            );
            self.channel.dismiss_helper(0);
        }
    }

    /// Notes it if the process that had the helper has ended: what another one uses of its memory is not counted. Whether
    /// it has.
    pub(crate) fn leave_if_ended(&self) -> bool {
        let inspector = self.attached().map(|attached| &attached.inspector);
        let has_ended = inspector.is_some_and(|inspector| inspector.process().has_ended());
        if has_ended {
            self.leave();
        }
        has_ended
    }
}
