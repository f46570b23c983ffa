//! Minimal versions of items that the modules under test use. Types that threads share are loom's.

pub mod util {
    pub mod sync {
        pub use loom::cell::UnsafeCell;
        pub use loom::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};

        /// The program's waiters poll many times before they sleep. Here once is enough.
        pub fn spin(done: impl Fn() -> bool) -> bool {
            done()
        }

        /// Parking of threads. Loom's own `unpark` loses its token if the thread is waiting for a
        /// lock.
        pub mod thread {
            use loom::sync::{Condvar, Mutex};
            use std::cell::RefCell;
            use std::sync::Arc;

            loom::thread_local! {
                static CURRENT: RefCell<Thread> = RefCell::default();
            }

            #[derive(Clone, Default)]
            pub struct Thread(Arc<(Mutex<bool>, Condvar)>);

            impl Thread {
                pub fn unpark(&self) {
                    *self.0.0.lock().unwrap() = true;
                    self.0.1.notify_one();
                }
            }

            pub fn current() -> Thread {
                CURRENT.with(|thread| thread.borrow().clone())
            }

            pub fn park() {
                let thread = current();
                let mut token = thread.0.0.lock().unwrap();
                while !*token {
                    token = thread.0.1.wait(token).unwrap();
                }
                *token = false;
            }

            pub struct JoinHandle<T>(loom::thread::JoinHandle<T>, Thread);

            impl<T> JoinHandle<T> {
                pub fn thread(&self) -> &Thread {
                    &self.1
                }

                pub fn join(self) -> std::thread::Result<T> {
                    self.0.join()
                }
            }

            pub struct Builder;

            impl Builder {
                pub fn new() -> Builder {
                    Builder
                }

                pub fn name(self, _: String) -> Builder {
                    self
                }

                pub fn spawn<T: 'static>(
                    self,
                    work: impl FnOnce() -> T + 'static,
                ) -> std::io::Result<JoinHandle<T>> {
                    let thread = Thread::default();
                    let own = thread.clone();
                    let handle = loom::thread::spawn(move || {
                        CURRENT.with(|current| current.replace(own));
                        work()
                    });
                    Ok(JoinHandle(handle, thread))
                }
            }
        }
    }
}

pub mod error {
    pub fn no_thread() -> &'static str {
        "no thread"
    }
}

pub mod cli {
    pub mod io {
        pub mod record {
            #[derive(Clone, Copy, Debug)]
            pub struct FinishReason;
        }
    }
}

pub mod decode {
    #[derive(Clone, Debug, PartialEq)]
    pub struct TokenLogProbs;
}

pub mod runtime {
    pub mod answers {
        pub struct AnswerRequest<D> {
            pub text: Text,
            pub data: D,
        }
        pub struct Text {
            pub history: Vec<u32>,
        }
    }
}

pub mod api {
    pub mod error {
        #[derive(Clone, Debug)]
        pub struct ApiError {
            pub code: &'static str,
        }
        impl ApiError {
            pub fn new(_status: u16, _message: impl Into<String>) -> ApiError {
                ApiError { code: "" }
            }
            pub fn code(self, code: &'static str) -> ApiError {
                ApiError { code }
            }
            pub fn ending() -> ApiError {
                ApiError { code: "ending" }
            }
        }
    }
}

pub mod tensor {
    pub trait Source: Sync {
        fn read_at(&self, offset: usize, to: &mut [u8]) -> anyhow::Result<()>;
    }
    impl Source for &[u8] {
        fn read_at(&self, offset: usize, to: &mut [u8]) -> anyhow::Result<()> {
            to.copy_from_slice(&self[offset..][..to.len()]);
            Ok(())
        }
    }
}

/// The GPU: memory that loom watches, and submissions that another thread completes.
pub mod device {
    pub mod memory {
        use loom::cell::UnsafeCell;

        /// A staging block. Loom watches accesses to its first byte.
        pub struct Block(pub UnsafeCell<[u8; 1]>);

        impl Block {
            /// # Safety
            /// No other access to these bytes happens at the same time.
            pub unsafe fn bytes(&self, _at: u64, len: usize) -> &mut [u8] {
                assert_eq!(len, 1, "a model reads single bytes");
                // SAFETY: the caller promises it, and loom checks it.
                self.0.with_mut(|byte| unsafe { &mut *byte })
            }
        }
    }
    pub mod queue {
        use loom::sync::{Condvar, Mutex};

        /// Counts completed submissions.
        pub struct TimelineSemaphore {
            pub done: Mutex<u64>,
            pub more: Condvar,
        }

        impl TimelineSemaphore {
            pub fn new() -> TimelineSemaphore {
                TimelineSemaphore { done: Mutex::new(0), more: Condvar::new() }
            }

            pub fn wait(&self, submission: u64) -> anyhow::Result<()> {
                let mut done = self.done.lock().unwrap();
                while *done < submission {
                    done = self.more.wait(done).unwrap();
                }
                Ok(())
            }

            /// Completes the next submission.
            pub fn end_one(&self) {
                *self.done.lock().unwrap() += 1;
                self.more.notify_all();
            }
        }
    }
}

/// The parts of Tokio's types that the server uses.
pub mod sync {
    use loom::sync::Mutex;
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    /// As Tokio documents, a call of `notify_waiters` completes all futures made before it.
    pub struct Notify(Mutex<(u64, Vec<Waker>)>);

    pub struct Notified<'a> {
        notify: &'a Notify,
        calls: u64,
    }

    impl Notify {
        pub fn new() -> Notify {
            Notify(Mutex::new((0, Vec::new())))
        }

        pub fn notified(&self) -> Notified<'_> {
            Notified { notify: self, calls: self.0.lock().unwrap().0 }
        }

        pub fn notify_waiters(&self) {
            let mut state = self.0.lock().unwrap();
            state.0 += 1;
            let waiting = std::mem::take(&mut state.1);
            drop(state);
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    impl Notified<'_> {
        pub fn enable(self: Pin<&mut Self>) -> bool {
            self.notify.0.lock().unwrap().0 != self.calls
        }
    }

    impl Future for Notified<'_> {
        type Output = ();

        fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
            let mut state = self.notify.0.lock().unwrap();
            if state.0 != self.calls {
                return Poll::Ready(());
            }
            state.1.push(context.waker().clone());
            Poll::Pending
        }
    }

    pub mod mpsc {
        use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
        use std::sync::Arc;

        /// The channel to a client: events sent, and whether the client has disconnected.
        #[derive(Default)]
        pub struct Channel {
            pub sent: AtomicUsize,
            pub is_gone: AtomicBool,
        }

        pub struct Sender<T>(pub Arc<Channel>, std::marker::PhantomData<fn(T)>);

        impl<T> Sender<T> {
            pub fn to(channel: &Arc<Channel>) -> Sender<T> {
                Sender(channel.clone(), std::marker::PhantomData)
            }

            pub fn is_closed(&self) -> bool {
                self.0.is_gone.load(Ordering::Acquire)
            }

            pub fn try_send(&self, _: T) -> Result<(), ()> {
                self.0.sent.fetch_add(1, Ordering::AcqRel);
                Ok(())
            }
        }
    }
}
